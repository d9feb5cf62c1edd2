// The threads that CPU jobs share.
#pragma once

#include <cstdint>
#include <functional>

namespace kvgraft::cpu {

// Calls body(0) ... body(count - 1), each once, in any order, on the calling
// thread and on helpers that are free, and returns when all are done. The first
// exception is rethrown here; tasks not begun by then are dropped.
//
// All callers share one limit, num_threads(): with as many callers as that,
// each works alone. Threads without work sleep.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// Limits the threads, callers included, that work at one time. 0 asks for the
// default: KVGRAFT_NUM_THREADS if set, else the cores this process may use.
void set_num_threads(int count);
int num_threads();

}  // namespace kvgraft::cpu
