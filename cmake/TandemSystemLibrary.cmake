# tandem_system_library(TARGET HEADER LIBRARY): an imported target for a library of the system that has no
# package config of its own. Included by the build and, once installed, by tandemConfig.cmake.
function(tandem_system_library target header library)
  if(TARGET ${target})
    return()
  endif()
  string(TOUPPER ${library} prefix)
  find_path(${prefix}_INCLUDE_DIR ${header} REQUIRED)
  find_library(${prefix}_LIBRARY ${library} REQUIRED)
  add_library(${target} UNKNOWN IMPORTED)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${${prefix}_LIBRARY}"
                                             INTERFACE_INCLUDE_DIRECTORIES "${${prefix}_INCLUDE_DIR}")
endfunction()
