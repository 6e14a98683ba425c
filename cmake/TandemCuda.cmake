# The CUDA device: TANDEM_CUDA_FOUND says whether this build has it. AUTO takes it where nvcc works; a build
# under sanitizers leaves it out, as they cannot look into it: its tests run on a fake runtime there.
set(TANDEM_CUDA "AUTO" CACHE STRING "CUDA device: AUTO (where nvcc is found), ON (required) or OFF")
set_property(CACHE TANDEM_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TANDEM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TANDEM_CUDA is '${TANDEM_CUDA}': use AUTO, ON or OFF")
endif()

# The compiler makes a kernel once for each architecture: packages have the code of every card that is common, a build of one's
# own half of that.
option(TANDEM_EVERY_CARD "Kernels for each card that packages are for: A100, RTX 40, H100, RTX 50" OFF)

set(TANDEM_CUDA_FOUND OFF)
if(TANDEM_CUDA STREQUAL "ON" OR (TANDEM_CUDA STREQUAL "AUTO" AND NOT TANDEM_SANITIZE))
  # A100 and H100 class. RTX 40 runs the code of the first; newer cards compile the intermediate code (PTX) of the last when a
  # program first starts there. A tree follows the option unless it was given architectures of its own.
  set(some_cards 80-real 90)
  set(every_card 80-real 89-real 90 120)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES OR CMAKE_CUDA_ARCHITECTURES STREQUAL "${some_cards}"
     OR CMAKE_CUDA_ARCHITECTURES STREQUAL "${every_card}")
    set(architectures ${some_cards})
    if(TANDEM_EVERY_CARD)
      set(architectures ${every_card})
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${architectures} CACHE STRING "CUDA architectures" FORCE)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    find_package(CUDAToolkit REQUIRED)
    set(TANDEM_CUDA_FOUND ON)
  elseif(TANDEM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TANDEM_CUDA=ON, but no nvcc works here: install the CUDA toolkit, or set CMAKE_CUDA_COMPILER")
  endif()
endif()
message(STATUS "CUDA device: ${TANDEM_CUDA_FOUND} (TANDEM_CUDA=${TANDEM_CUDA})")
