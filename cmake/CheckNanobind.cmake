# A nanobind with other internals than mlx's builds, links and imports, but no
# mlx.core.array gets through the binding. Look now rather than at the first
# call.
function(kvgraft_check_nanobind)
  # KVGRAFT_MLX_INTERNALS stands in for the query when mlx.core cannot be
  # imported here (cross compiling).
  if(DEFINED KVGRAFT_MLX_INTERNALS)
    set(theirs "${KVGRAFT_MLX_INTERNALS}")
  else()
    execute_process(
      COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/mlx_nanobind_internals.py"
      OUTPUT_STRIP_TRAILING_WHITESPACE
      OUTPUT_VARIABLE theirs COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(header "${NB_DIR}/src/nb_internals.h")
  if(EXISTS "${NB_DIR}/src/nb_abi.h") # nanobind 2
    set(header "${NB_DIR}/src/nb_abi.h")
  endif()
  file(STRINGS "${header}" ours REGEX "define NB_INTERNALS_VERSION [0-9]+")
  string(REGEX REPLACE ".* ([0-9]+)$" "\\1" ours "${ours}")
  if(NOT ours STREQUAL theirs)
    message(
      FATAL_ERROR
        "nanobind ${nanobind_VERSION} has internals v${ours}, but the installed mlx was built "
        "with v${theirs}. Install the nanobind and mlx named in pyproject.toml.")
  endif()
endfunction()
