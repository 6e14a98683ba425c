# Attention by cuDNN: TANDEM_CUDNN_FOUND says whether this build has it. It needs two sets of headers and no library:
# cuDNN's own, which come with it, and those of the cudnn-frontend, which no distribution packages. They are what
# CUDNN_FRONTEND_INCLUDE_DIR names, or else fetched from PyPI by version and hash (cudnn-frontend.txt) into the build
# tree. AUTO builds without where either cannot be had, and the plain kernels compute attention.
set(TANDEM_CUDNN "AUTO" CACHE STRING "Attention by cuDNN: AUTO (where its headers are found or fetched), ON (required) or OFF")
set_property(CACHE TANDEM_CUDNN PROPERTY STRINGS AUTO ON OFF)
if(NOT TANDEM_CUDNN MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TANDEM_CUDNN is '${TANDEM_CUDNN}': use AUTO, ON or OFF")
endif()
set(oldest_cudnn 9.18.0)  # as in gpu_ops/ops/attention_cudnn.cpp

# tandem_fetch_cudnn_frontend(FOLDER WHY): headers into FOLDER/include; WHY is empty, or says why they are not there.
function(tandem_fetch_cudnn_frontend folder why)
  set(requirement ${PROJECT_SOURCE_DIR}/cmake/cudnn-frontend.txt)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${requirement})
  file(SHA256 ${requirement} asked)
  set(mark ${folder}/requirement-${asked})
  set(${why} "" PARENT_SCOPE)
  if(EXISTS ${mark})
    return()
  endif()
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(NOT Python3_FOUND)
    set(${why} "there is no Python to fetch them with" PARENT_SCOPE)
    return()
  endif()
  file(REMOVE_RECURSE ${folder})
  # Any machine may take this wheel, since nothing of it but headers is used.
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-input --timeout 20 --retries 1
            --no-deps --require-hashes --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311
            --platform manylinux_2_28_x86_64 --dest ${folder}/wheel --requirement ${requirement}
    RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE error)
  file(GLOB wheel ${folder}/wheel/*.whl)
  if(NOT result EQUAL 0 OR NOT wheel)
    string(REGEX MATCH "(ERROR: |No module named )[^\n]*" line "${error}")
    set(${why} "pip could not fetch the cudnn-frontend (${line})" PARENT_SCOPE)
    return()
  endif()
  file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${folder} PATTERNS include/* *.dist-info/licenses/*)
  file(REMOVE_RECURSE ${folder}/wheel)
  file(TOUCH ${mark})
endfunction()

# tandem_look_for_cudnn(WHY): sets CUDNN_INCLUDE_DIR and CUDNN_FRONTEND_INCLUDE_DIR; WHY is empty, or says what is missing.
function(tandem_look_for_cudnn why)
  file(GLOB of_python $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cudnn/include
       /usr/lib/python3*/dist-packages/nvidia/cudnn/include /usr/local/lib/python3*/*-packages/nvidia/cudnn/include)
  find_path(CUDNN_INCLUDE_DIR cudnn_version.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${of_python})
  if(NOT CUDNN_INCLUDE_DIR)
    set(${why} "cuDNN's headers are not found" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${CUDNN_INCLUDE_DIR}/cudnn_version.h lines REGEX "define CUDNN_(MAJOR|MINOR|PATCHLEVEL) [0-9]+")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." version)
  if(version VERSION_LESS oldest_cudnn OR version VERSION_GREATER_EQUAL 10)
    set(${why} "cuDNN's headers are ${version}, and 9 from ${oldest_cudnn} on is needed" PARENT_SCOPE)
    return()
  endif()
  set(CUDNN_FRONTEND_INCLUDE_DIR "" CACHE PATH "Headers of the cudnn-frontend; empty: fetched from PyPI")
  if(NOT CUDNN_FRONTEND_INCLUDE_DIR)
    set(folder ${PROJECT_BINARY_DIR}/cudnn-frontend)
    tandem_fetch_cudnn_frontend(${folder} missing)
    set(${why} "${missing}" PARENT_SCOPE)
    set(CUDNN_FRONTEND_INCLUDE_DIR ${folder}/include PARENT_SCOPE)
  elseif(NOT EXISTS ${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend.h)
    set(${why} "${CUDNN_FRONTEND_INCLUDE_DIR} has no cudnn_frontend.h" PARENT_SCOPE)
  endif()
endfunction()

set(TANDEM_CUDNN_FOUND OFF)
if(TANDEM_CUDA_FOUND AND NOT TANDEM_CUDNN STREQUAL "OFF")
  set(why_no_cudnn "")
  tandem_look_for_cudnn(why_no_cudnn)
  if(why_no_cudnn STREQUAL "")
    set(TANDEM_CUDNN_FOUND ON)
  elseif(TANDEM_CUDNN STREQUAL "ON")
    message(FATAL_ERROR "TANDEM_CUDNN=ON, but ${why_no_cudnn}")
  else()
    message(WARNING "Attention is built without cuDNN, and is slower: ${why_no_cudnn}")
  endif()
endif()
message(STATUS "Attention by cuDNN: ${TANDEM_CUDNN_FOUND} (TANDEM_CUDNN=${TANDEM_CUDNN})")
