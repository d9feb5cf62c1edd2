# The CPU side of map_layer, without MLX. One binary runs everywhere: each kernel
# file is compiled for its instruction set, and csrc/cpu/isa.cpp chooses at run
# time.
set(KVGRAFT_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(KVGRAFT_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl ${KVGRAFT_AVX2_FLAGS}
                         -Wno-maybe-uninitialized)

function(kvgraft_cpu_sources out)
  set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc/cpu")
  set(files isa.cpp kernel_plain.cpp map_layer.cpp pool.cpp)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    list(APPEND files kernel_avx2.cpp kernel_avx512.cpp)
    set_source_files_properties("${folder}/kernel_avx2.cpp" PROPERTIES COMPILE_OPTIONS
                                                                       "${KVGRAFT_AVX2_FLAGS}")
    set_source_files_properties("${folder}/kernel_avx512.cpp" PROPERTIES COMPILE_OPTIONS
                                                                         "${KVGRAFT_AVX512_FLAGS}")
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(arm64|aarch64)$")
    list(APPEND files kernel_neon.cpp)
  else()
    message(STATUS "No tuned kernel for ${CMAKE_SYSTEM_PROCESSOR}; using plain C++.")
  endif()
  list(TRANSFORM files PREPEND "${folder}/")
  set(${out} ${files} PARENT_SCOPE)
endfunction()
