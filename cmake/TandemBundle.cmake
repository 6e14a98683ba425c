# Target `bundle`: a folder that runs on any machine with glibc (and a driver, for the GPU): programs, tests
# for the GPU, benchmarks, and the libraries they need, found from where they lie. cuBLASLt and cuDNN, hundreds
# of megabytes, are looked for on that machine (docs/cuda.md).
get_property(bundled_suites GLOBAL PROPERTY TANDEM_GPU_SUITES)
get_property(bundled_benches GLOBAL PROPERTY TANDEM_BENCHES)
set(bundled tandem ${bundled_suites} ${bundled_benches})
set(bundled_files "")
foreach(target ${bundled})
  # The old kind of path is followed by the libraries' own libraries too.
  set_property(TARGET ${target} APPEND PROPERTY BUILD_RPATH "$ORIGIN/../lib")
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
  list(APPEND bundled_files $<TARGET_FILE:${target}>)
endforeach()

add_custom_target(bundle
  COMMAND ${CMAKE_COMMAND} -D "PROGRAMS=${bundled_files}" -D SOURCE=${PROJECT_SOURCE_DIR}
          -D FOLDER=${PROJECT_BINARY_DIR}/bundle/tandem-${PROJECT_VERSION} -D STRIP=${CMAKE_STRIP}
          -P ${CMAKE_CURRENT_LIST_DIR}/bundle.cmake
  DEPENDS ${bundled} VERBATIM COMMENT "Bundle in ${PROJECT_BINARY_DIR}/bundle")
