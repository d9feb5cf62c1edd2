#include "cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace kvgraft::cpu {

namespace {

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int default_threads() {
  if (const char* text = std::getenv("KVGRAFT_NUM_THREADS")) {
    const int count = std::atoi(text);
    if (count > 0) return std::min(count, 1024);
  }
  return usable_cores();
}

// One parallel_for in flight.
struct Loop {
  const std::function<void(int64_t)>& body;
  const int64_t count;
  std::atomic<int64_t> next{0};
  // Guarded by the pool's mutex.
  int workers = 1;
  std::exception_ptr error = nullptr;

  bool claimable() const { return next.load(std::memory_order_relaxed) < count; }
};

class Pool {
 public:
  void run(int64_t count, const std::function<void(int64_t)>& body) {
    Loop loop{body, count};
    std::unique_lock lock(mutex_);
    ++working_;
    const auto place = loops_.insert(loops_.end(), &loop);
    start_helpers();
    lock.unlock();
    for (int64_t i = 1; i < std::min<int64_t>(count, limit_); ++i) wake_.notify_one();
    work(loop, /*is_caller=*/true);
    lock.lock();
    // Nothing is left to claim, so no helper joins from here on.
    loops_.erase(place);
    --loop.workers;
    --working_;
    const bool others = !loops_.empty();
    if (others) wake_.notify_all();  // this thread's share is free again
    left_.wait(lock, [&] { return loop.workers == 0; });
    const std::exception_ptr error = loop.error;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

  void set_limit(int count) {
    std::lock_guard lock(mutex_);
    limit_ = count > 0 ? std::min(count, 1024) : default_threads();
    start_helpers();
    wake_.notify_all();
  }

  int limit() { return limit_; }

 private:
  void start_helpers() {  // with the mutex held
    if (loops_.empty()) return;
    while (helpers_ < limit_ - 1) {
      // Detached, and the pool is never destroyed: MLX's stream threads may
      // still run while static objects go.
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had; callers work all the same
      }
      ++helpers_;
    }
  }

  Loop* find_loop() {  // with the mutex held: the one with the fewest workers
    if (working_ >= limit_) return nullptr;
    Loop* best = nullptr;
    for (Loop* loop : loops_) {
      if (loop->claimable() && (!best || loop->workers < best->workers)) best = loop;
    }
    return best;
  }

  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Loop* loop = nullptr;
      wake_.wait(lock, [&] { return (loop = find_loop()) != nullptr; });
      ++loop->workers;
      ++working_;
      lock.unlock();
      work(*loop, /*is_caller=*/false);
      lock.lock();
      --working_;
      if (--loop->workers == 0) left_.notify_all();
    }
  }

  void work(Loop& loop, bool is_caller) {
    // A caller is never turned away; a helper gives its place to a caller that
    // has come since.
    while (is_caller || working_ <= limit_) {
      const int64_t task = loop.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= loop.count) return;
      try {
        loop.body(task);
      } catch (...) {
        loop.next.store(loop.count, std::memory_order_relaxed);
        std::lock_guard lock(mutex_);
        if (!loop.error) loop.error = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;  // there may be work for a helper
  std::condition_variable left_;  // a loop has lost its last worker
  std::list<Loop*> loops_;
  std::atomic<int> limit_{default_threads()};
  std::atomic<int> working_{0};  // callers and helpers inside work()
  int helpers_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

}  // namespace

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  if (count > 0) pool().run(count, body);
}

void set_num_threads(int count) {
  pool().set_limit(count);
}

int num_threads() {
  return pool().limit();
}

}  // namespace kvgraft::cpu
