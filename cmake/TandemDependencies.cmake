# Everything comes from the distribution's packages, which scripts/packages lists; one set of headers is fetched, and is
# not needed (TandemCudnn.cmake).
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(TBB REQUIRED)
find_package(dnnl REQUIRED)

find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h REQUIRED)
include(TandemSystemLibrary)
tandem_system_library(hwloc::hwloc hwloc.h hwloc)
tandem_system_library(xxhash::xxhash xxhash.h xxhash)
# Built with it, the library can choose among the instructions of this processor; on others than x86 it has no choice.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES xxhash::xxhash)
check_cxx_source_compiles("
#include <xxhash.h>
#include <xxh_x86dispatch.h>
int main() { return static_cast<int>(XXH3_128bits_update(nullptr, nullptr, 0)); }" TANDEM_XXHASH_CHOOSES)
unset(CMAKE_REQUIRED_LIBRARIES)
add_library(tomlplusplus INTERFACE)
target_include_directories(tomlplusplus SYSTEM INTERFACE "${TOMLPLUSPLUS_INCLUDE_DIR}")

if(TANDEM_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TANDEM_BENCH)
  find_package(benchmark REQUIRED)
endif()
