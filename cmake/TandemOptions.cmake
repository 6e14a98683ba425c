option(TANDEM_TESTS "Build the tests" ON)
option(TANDEM_BENCH "Build the benchmarks" ON)
option(TANDEM_FUZZ "Configure the target fuzz and nothing else (clang alone; see scripts/fuzz)" OFF)
set(TANDEM_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")
set(TANDEM_THREADS "tbb" CACHE STRING "Data parallelism on the CPU: tbb, or pool (a pool of our own, for ThreadSanitizer)")
set_property(CACHE TANDEM_THREADS PROPERTY STRINGS tbb pool)

# Half of what a compiler reads of a file is headers, and several files read them once. In the trees of sanitizers all sources
# are compiled so; in the optimised one those of tests, as modules are to be what users build, each file with all includes that
# it needs.
set(TANDEM_UNITY "OFF" CACHE STRING "Sources compiled several at once: OFF, TESTS (those of tests) or ALL")
set_property(CACHE TANDEM_UNITY PROPERTY STRINGS OFF TESTS ALL)
if(NOT TANDEM_UNITY MATCHES "^(OFF|TESTS|ALL)$")
  message(FATAL_ERROR "TANDEM_UNITY is '${TANDEM_UNITY}': use OFF, TESTS or ALL")
endif()
if(TANDEM_UNITY STREQUAL "ALL")
  set(CMAKE_UNITY_BUILD ON)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
find_program(TANDEM_CCACHE ccache)
if(TANDEM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TANDEM_CCACHE})
endif()

# Flags of our own targets only. Contraction is off everywhere: every fused multiply-add is explicit,
# because bits must not depend on what a compiler chose to fuse.
add_library(tandem_flags INTERFACE)
set(warnings -Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Werror
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>  # g++ 12 warns about its own std::string operator+ (GCC bug 105651)
  $<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-pragmas>)  # `GCC ivdep`: clang asks at run time whether arrays overlap
target_compile_options(tandem_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${warnings};-Wpedantic;-ffp-contract=off;-fno-math-errno;-fno-trapping-math>"
  # The host half of a .cu file is text that nvcc made: pedantry would be about its style.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Wall;-Xcompiler=-Wextra;-Xcompiler=-ffp-contract=off>")
if(TANDEM_SANITIZE)
  target_compile_options(tandem_flags INTERFACE -fsanitize=${TANDEM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # g++ 12 takes the deliberately undefined registers of its own vector intrinsics for a mistake here.
  target_compile_options(tandem_flags INTERFACE "$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>")
  # What is found in a library by name is called with types of our own.
  target_compile_options(tandem_flags INTERFACE $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=function>)
  target_link_options(tandem_flags INTERFACE -fsanitize=${TANDEM_SANITIZE})
endif()
