#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/map_layer.h"

namespace kvgraft::cpu {

namespace {

std::vector<const Isa*> usable() {
  std::vector<const Isa*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&avx512_isa);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back(&avx2_isa);
  }
#elif defined(__aarch64__)
  found.push_back(&neon_isa);
#endif
  found.push_back(&plain_isa);
  return found;
}

const Isa* find(const std::string& name, const std::string& asked_by) {
  std::string names;
  for (const Isa* isa : usable()) {
    if (name == isa->name) return isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument("[map_layer] " + asked_by + " asks for the instruction set '" + name +
                              "', which this processor or build does not have. It has: " + names +
                              ".");
}

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa* isa : usable()) names.push_back(isa->name);
  return names;
}

const Isa& current_isa() {
  const Isa* isa = chosen.load(std::memory_order_acquire);
  if (!isa) {
    const char* name = std::getenv("KVGRAFT_CPU_ISA");
    isa = name && *name ? find(name, "KVGRAFT_CPU_ISA") : usable().front();
    chosen.store(isa, std::memory_order_release);
  }
  return *isa;
}

void use_isa(const std::string& name) {
  chosen.store(find(name, "use_isa"), std::memory_order_release);
}

}  // namespace kvgraft::cpu
