# Attention as cuDNN is asked for it: over a library of that name made of this CPU, and as far as the real one gets
# without a GPU. Included by CMakeLists.txt of the folder above.
set(attention_object $<TARGET_OBJECTS:tandem_attention_cudnn> ${PROJECT_SOURCE_DIR}/gpu_ops/device/library_file.cpp
                     ${PROJECT_SOURCE_DIR}/gpu_ops/device/shared_library.cpp)
set(attention_links fmt::fmt ${CMAKE_DL_LIBS} ${emulated} GTest::gtest_main)

# Whoever loads the real library by name finds this one loaded.
add_library(fake_cudnn SHARED cudnn/fake_cudnn.cpp)
set_target_properties(fake_cudnn PROPERTIES OUTPUT_NAME cudnn SOVERSION 9)
add_library(fake_nvrtc SHARED cudnn/fake_nvrtc.cpp)
set_target_properties(fake_nvrtc PROPERTIES OUTPUT_NAME nvrtc SOVERSION 13)
# Linked by nobody: it lies beside the compiler.
add_library(fake_nvrtc_builtins SHARED cudnn/fake_nvrtc_builtins.cpp)
set_target_properties(fake_nvrtc_builtins PROPERTIES OUTPUT_NAME nvrtc-builtins SOVERSION 13.1)
add_executable(gpu_cudnn_test cudnn/attention_cudnn_test.cpp ${attention_object})
add_dependencies(gpu_cudnn_test fake_nvrtc_builtins)
foreach(target fake_cudnn fake_nvrtc fake_nvrtc_builtins gpu_cudnn_test)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(${target} SYSTEM PRIVATE ${CUDNN_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(${target} PRIVATE tandem_flags)
endforeach()
target_link_libraries(gpu_cudnn_test PRIVATE tandem_test_flags -Wl,--no-as-needed fake_cudnn fake_nvrtc -Wl,--as-needed ops_attention_tests
                                             ${attention_links})
tandem_suites(gpu_cudnn_test gpu_kernels.over_cudnn CASES * !Cudnn.ALibrary*)
# What is found of a library holds for the process.
foreach(found VERSION=91501:ALibraryTooOldIsNotUsed VERSION=92000:ALibraryThatDoesNotStartIsNotUsed
              CUDART=99000:ALibraryWithoutItsCompilerIsNotUsed)
  string(REPLACE ":" ";" parts ${found})
  list(GET parts 0 setting)
  list(GET parts 1 case)
  add_test(NAME gpu_kernels.over_cudnn.${case} COMMAND gpu_cudnn_test --gtest_filter=Cudnn.${case})
  set_tests_properties(gpu_kernels.over_cudnn.${case} PROPERTIES ENVIRONMENT TANDEM_FAKE_CUDNN_${setting})
endforeach()

# The real library plans for a card that is described to it, and compiles kernels for that; a driver of ours takes them.
# Skipped where the library is not installed.
add_library(fake_driver SHARED cudnn/fake_driver.cpp)
set_target_properties(fake_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1 LIBRARY_OUTPUT_DIRECTORY
                                             ${CMAKE_CURRENT_BINARY_DIR}/driver)
target_link_libraries(fake_driver PRIVATE tandem_flags)
add_executable(gpu_cudnn_plans_test cudnn/plans_test.cpp ${attention_object})
target_link_libraries(gpu_cudnn_plans_test PRIVATE tandem_test_flags -Wl,--no-as-needed fake_driver -Wl,--as-needed
                                                   ${attention_links})
add_test(NAME gpu_kernels.cudnn_plans COMMAND gpu_cudnn_plans_test --gtest_filter=-*OlderAndNewerCards)
add_test(NAME gpu_kernels.cudnn_plans_long COMMAND gpu_cudnn_plans_test --gtest_filter=*OlderAndNewerCards)
set_tests_properties(gpu_kernels.cudnn_plans gpu_kernels.cudnn_plans_long PROPERTIES TIMEOUT 600
                     SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\] CudnnPlans")
set_tests_properties(gpu_kernels.cudnn_plans_long PROPERTIES LABELS long)  # a minute
# Where something else lies in its place, nothing is found.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/no_cudnn/libcudnn.so.9 "no library")
add_test(NAME gpu_kernels.no_cudnn COMMAND ${CMAKE_COMMAND} -E env --unset=VIRTUAL_ENV --unset=CONDA_PREFIX
         --unset=TANDEM_CUDA_LIBS HOME=/nonexistent PATH=/nonexistent LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR}/no_cudnn
         $<TARGET_FILE:gpu_cudnn_plans_test> --gtest_filter=WithoutCudnn.* --gtest_also_run_disabled_tests)
set_tests_properties(gpu_kernels.no_cudnn PROPERTIES PASS_REGULAR_EXPRESSION "\\[  PASSED  \\] 1 test")

# Several libraries at once, of which the system has one: each a front with parts beside it, as the real one is.
set(fakes ${CMAKE_CURRENT_BINARY_DIR}/cudnn_search)
add_executable(gpu_cudnn_search_test cudnn/search_test.cpp ${attention_object})
target_compile_definitions(gpu_cudnn_search_test PRIVATE TANDEM_FAKE_CUDNN_FOLDER="${fakes}")
target_link_libraries(gpu_cudnn_search_test PRIVATE tandem_test_flags -Wl,--no-as-needed fake_nvrtc -Wl,--as-needed ${attention_links})
set(of_version lib/python3.12/site-packages/nvidia/cudnn/lib)
foreach(version 9.10.2 9.14.0 9.19.0 9.20.1)
  string(REPLACE "." ";" numbers ${version})
  list(GET numbers 0 major)
  list(GET numbers 1 minor)
  list(GET numbers 2 patch)
  foreach(part cudnn cudnn_graph cudnn_heuristic)
    set(fake fake_${part}_${version})
    add_library(${fake} SHARED cudnn/fake_part.cpp)
    if(part STREQUAL cudnn)
      set_property(TARGET ${fake} PROPERTY SOURCES cudnn/fake_front.cpp)
      target_link_options(${fake} PRIVATE -Wl,--enable-new-dtags,-rpath,$ORIGIN)
    else()
      target_link_options(${fake} PRIVATE -Wl,-z,nodelete)
    endif()
    target_compile_definitions(${fake} PRIVATE FAKE_MAJOR=${major} FAKE_MINOR=${minor} FAKE_PATCH=${patch})
    target_link_libraries(${fake} PRIVATE tandem_flags ${CMAKE_DL_LIBS})
    set_target_properties(${fake} PROPERTIES OUTPUT_NAME ${part} SOVERSION 9 LIBRARY_OUTPUT_DIRECTORY ${fakes}/${version}/${of_version})
    add_dependencies(gpu_cudnn_search_test ${fake})
  endforeach()
endforeach()
# CASE:system:Python's packages:TANDEM_CUDA_LIBS
foreach(row GoesOnToTheFirstThatIsNewEnough:9.14.0:9.19.0:9.20.1 TellsTheNewestWhereAllAreTooOld:9.10.2:9.14.0:9.10.2
            TakesNoneThatWouldRunOnPartsOfAnOlderOne:9.19.0:9.20.1:9.20.1)
  string(REPLACE ":" ";" row ${row})
  list(GET row 0 case)
  list(GET row 1 system)
  list(GET row 2 python)
  list(GET row 3 given)
  add_test(NAME gpu_kernels.cudnn_search.${case}
           COMMAND ${CMAKE_COMMAND} -E env --unset=CONDA_PREFIX HOME=/nonexistent PATH=/nonexistent
                   LD_LIBRARY_PATH=${fakes}/${system}/${of_version} VIRTUAL_ENV=${fakes}/${python}
                   TANDEM_CUDA_LIBS=${fakes}/${given}/${of_version} $<TARGET_FILE:gpu_cudnn_search_test>
                   --gtest_filter=*${case} --gtest_also_run_disabled_tests)
  set_tests_properties(gpu_kernels.cudnn_search.${case} PROPERTIES PASS_REGULAR_EXPRESSION "\\[  PASSED  \\] 1 test")
endforeach()
