# Installation, so that find_package(tandem CONFIG REQUIRED) and target_link_libraries(app tandem::tandem)
# are all that another project needs. Only the modules behind the public headers are installed.
include(CMakePackageConfigHelpers)

set(public_modules core cpu_ops gpu_scratch scheduler offload io comm api)
if(TARGET tandem_gpu_ops)
  list(INSERT public_modules 2 gpu_ops)
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
set(header_dir ${CMAKE_INSTALL_INCLUDEDIR}/tandem)

add_library(tandem_package INTERFACE)
add_library(tandem::tandem ALIAS tandem_package)
set_target_properties(tandem_package PROPERTIES EXPORT_NAME tandem)
target_compile_features(tandem_package INTERFACE cxx_std_20)
target_link_libraries(tandem_package INTERFACE tandem_api)
target_include_directories(tandem_package INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
set(installed tandem_package)
foreach(module ${public_modules})
  get_property(parts GLOBAL PROPERTY TANDEM_PARTS_${module})
  if(NOT parts)
    set(parts ${module})
  endif()
  foreach(part ${parts})
    set_target_properties(tandem_${part} PROPERTIES EXPORT_NAME ${part})
    list(APPEND installed tandem_${part})
  endforeach()
endforeach()

install(TARGETS ${installed} EXPORT tandem ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/tandem)
install(TARGETS tandem RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT tandem NAMESPACE tandem:: FILE tandemTargets.cmake DESTINATION ${package_dir})

install(CODE "set(header_dir \"\${CMAKE_INSTALL_PREFIX}/${header_dir}\")
set(header_roots \"${PROJECT_SOURCE_DIR}/include\" \"${PROJECT_SOURCE_DIR}\" \"${PROJECT_BINARY_DIR}/generated\")")
install(SCRIPT cmake/TandemInstalledHeaders.cmake)
# Completion and man page are made by the program that is installed.
foreach(text "bash|bash-completion/completions/tandem" "zsh|zsh/site-functions/_tandem"
             "fish|fish/vendor_completions.d/tandem.fish" "man|man/man1/tandem.1")
  string(REPLACE "|" ";" text "${text}")
  list(GET text 0 kind)
  list(GET text 1 file)
  cmake_path(SET made ${PROJECT_BINARY_DIR}/generated/share/${file})
  cmake_path(GET file PARENT_PATH folder)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/generated/share/${folder})
  install(CODE "execute_process(COMMAND \"$<TARGET_FILE:tandem>\" completion ${kind} OUTPUT_FILE \"${made}\"
                COMMAND_ERROR_IS_FATAL ANY)")
  install(FILES ${made} DESTINATION ${CMAKE_INSTALL_DATADIR}/${folder})
endforeach()
# The tokenizer of `tandem sample`, which finds it from where the program lies.
install(PROGRAMS tools/tokenizer_process.py DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/tools)
install(DIRECTORY tools/preparation DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/tools PATTERN "__pycache__" EXCLUDE)
install(FILES LICENSE NOTICE THIRD_PARTY.md DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tandem)

configure_package_config_file(cmake/tandemConfig.cmake.in ${PROJECT_BINARY_DIR}/tandemConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its users.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tandemConfig.cmake ${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake
              cmake/TandemSystemLibrary.cmake
        DESTINATION ${package_dir})
