# cmake -D SOURCE=... -D BUILD=... -D COMPILER=... -P install_test.cmake
# Installs BUILD into a prefix of its own, builds a copy of examples/custom_trainer against it, and runs it.
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

run("install" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${area}/prefix)

# A package that names the tree it was built in works only while that tree is there.
file(GLOB_RECURSE package ${area}/prefix/*.cmake)
if(NOT package)
  leave("no package config was installed")
endif()
foreach(file ${package})
  file(READ ${file} text)
  foreach(tree ${SOURCE} ${BUILD})
    string(FIND "${text}" "${tree}" position)
    if(NOT position EQUAL -1)
      leave("${file} names ${tree}")
    endif()
  endforeach()
endforeach()

file(COPY ${SOURCE}/examples/custom_trainer DESTINATION ${area})
run("configure" ${CMAKE_COMMAND} -S ${area}/custom_trainer -B ${area}/build -DCMAKE_PREFIX_PATH=${area}/prefix
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release)
run("build" ${CMAKE_COMMAND} --build ${area}/build)
run("train" ${area}/build/custom_trainer)
run("installed program" ${area}/prefix/bin/tandem --version)
file(REMOVE_RECURSE ${area})
