# A folder of a test's own, `area`, which goes with the test; commands whose failure ends it.
execute_process(COMMAND mktemp -d OUTPUT_VARIABLE area OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

function(leave message)
  file(REMOVE_RECURSE ${area})
  message(FATAL_ERROR "${message}")
endfunction()

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message(STATUS "${what}\n${output}")
  if(NOT result EQUAL 0)
    leave("${what} failed: ${result}")
  endif()
endfunction()
