# What CTest runs of a program of GoogleTest: a suite at a time, in a process of its own, with labels that say when.
#
#   sanitize  runs in the tree of this sanitizer
#   slow      goes through the same code as another test: run by the nightly presets alone
#   long      takes more than a minute: the same
#   gpu       needs a GPU
#
# The presets of CTest (CMakePresets.json) choose by these labels and by nothing else.
set(TANDEM_SUITE_RESULTS ${PROJECT_BINARY_DIR}/tests/results)

# tandem_suites(PROGRAM PREFIX [CASES pattern...] [LONG pattern...] [SLOW pattern...] [ADDRESS pattern...] [THREAD pattern...]
#               [SLOW_SANITIZED pattern...] [SHARDS suite=number...] [ENVIRONMENT name=value...] [TIMEOUT seconds])
# Tests PREFIX.Suite of the suites of PROGRAM, found after each build of it. Patterns name cases as tests/list_suites.py says:
# CASES those that are tests at all, otherwise all; LONG and SLOW those with that label, SLOW_SANITIZED those that are slow
# under a sanitizer instead; ADDRESS those that run under AddressSanitizer with UndefinedBehaviorSanitizer, THREAD under
# ThreadSanitizer. SHARDS divides long suites among processes.
function(tandem_suites program prefix)
  cmake_parse_arguments(S "" "TIMEOUT" "CASES;LONG;SLOW;ADDRESS;THREAD;SLOW_SANITIZED;SHARDS;ENVIRONMENT" ${ARGN})
  if(NOT S_TIMEOUT)
    set(S_TIMEOUT 1200)
  endif()
  tandem_sanitizer(sanitizer)
  set(sanitized "")
  if(sanitizer)
    set(sanitized ${S_${sanitizer}})
    set(S_SLOW "")
    if(sanitized)
      set(S_SLOW ${S_SLOW_SANITIZED})
    endif()
  endif()
  tandem_needed_under_sanitizer(${program} "${sanitized}" "${S_SLOW}")
  set(list ${CMAKE_CURRENT_BINARY_DIR}/${program}_suites.cmake)
  set(command ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/list_suites.py $<TARGET_FILE:${program}> --prefix ${prefix}
              --output ${list} --results ${TANDEM_SUITE_RESULTS} --sanitizer=${sanitizer} --timeout ${S_TIMEOUT})
  foreach(option CASES LONG SLOW SHARDS ENVIRONMENT)
    string(TOLOWER ${option} flag)
    if(S_${option})
      list(APPEND command --${flag} ${S_${option}})
    endif()
  endforeach()
  if(sanitized)
    list(APPEND command --sanitize ${sanitized})
  endif()
  add_custom_command(TARGET ${program} POST_BUILD COMMAND ${command} BYPRODUCTS ${list} VERBATIM)
  # The list is part of the program: one that is there without the other is built anew.
  set_property(TARGET ${program} APPEND PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/tests/list_suites.py)
  set(included ${CMAKE_CURRENT_BINARY_DIR}/${program}_include.cmake)
  set(labels "")
  if(sanitized AND NOT S_SLOW STREQUAL "*")
    set(labels sanitize)
  elseif(sanitized)
    set(labels "sanitize;slow")
  endif()
  file(WRITE ${included} "if(EXISTS \"${list}\")\n  include(\"${list}\")\nelse()\n  add_test(${prefix}.${program}_is_not_built "
                         "${program}_is_not_built)\n  set_tests_properties(${prefix}.${program}_is_not_built PROPERTIES LABELS "
                         "\"${labels}\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${included})
endfunction()

# ADDRESS or THREAD, as this tree is built; nothing otherwise.
function(tandem_sanitizer variable)
  set(${variable} "" PARENT_SCOPE)
  if(TANDEM_SANITIZE MATCHES address)
    set(${variable} ADDRESS PARENT_SCOPE)
  elseif(TANDEM_SANITIZE MATCHES thread)
    set(${variable} THREAD PARENT_SCOPE)
  endif()
endfunction()

# What the build presets of a sanitizer build: the programs of which it runs something, by the nightly preset also those of
# which all is slow.
if(TANDEM_SANITIZE)
  add_custom_target(sanitized_tests)
  add_custom_target(sanitized_tests_nightly)
  add_dependencies(sanitized_tests_nightly sanitized_tests)
endif()

function(tandem_needed_under_sanitizer target sanitized slow)
  if(sanitized AND slow STREQUAL "*")
    add_dependencies(sanitized_tests_nightly ${target})
  elseif(sanitized)
    add_dependencies(sanitized_tests ${target})
  endif()
endfunction()
