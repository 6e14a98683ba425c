# Readers of what users bring, under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer: scripts/fuzz. The
# libraries that they are made of are instrumented like the targets, and nothing else of tandem is built.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "TANDEM_FUZZ needs clang: -DCMAKE_CXX_COMPILER=clang++")
endif()
# By tandem_flags, which precompiled headers have too: they must be compiled like the files that take them.
target_compile_options(tandem_flags INTERFACE -O1 -g1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined
                                              -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS)
add_link_options(-fsanitize=fuzzer,address,undefined)
foreach(module core scheduler models data io comm train)
  add_subdirectory(${module} EXCLUDE_FROM_ALL)
endforeach()
add_subdirectory(tests/fuzz)
