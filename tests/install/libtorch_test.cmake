# cmake -D SOURCE=... -D BUILD=... -D COMPILER=... -D GENERATOR=... -P libtorch_test.cmake
# Installs BUILD into a prefix of its own, builds a copy of examples/libtorch_trainer against it and the libtorch of a Python
# that has one, and runs it. Without one it says "no libtorch", by which the test is skipped.
foreach(python $ENV{TANDEM_BENCH_PYTHON} ${BUILD}/torch-venv/bin/python ${BUILD}/bench-venv/bin/python python3)
  execute_process(COMMAND ${python} -c "import torch; print(torch.utils.cmake_prefix_path)" OUTPUT_VARIABLE libtorch
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result ERROR_QUIET)
  if(result EQUAL 0 AND EXISTS ${libtorch}/Torch/TorchConfig.cmake)
    break()
  endif()
  set(libtorch "")
endforeach()
if(NOT libtorch)
  message(STATUS "no libtorch: no Python here has torch (TANDEM_BENCH_PYTHON, build/torch-venv, build/bench-venv, python3)")
  return()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/area.cmake)
run("install" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${area}/prefix)
file(COPY ${SOURCE}/examples/libtorch_trainer DESTINATION ${area})
run("configure" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${area}/libtorch_trainer -B ${area}/build
    -DCMAKE_PREFIX_PATH=${area}/prefix -DTorch_DIR=${libtorch}/Torch -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_BUILD_TYPE=Release)
run("build" ${CMAKE_COMMAND} --build ${area}/build)
run("train" ${area}/build/libtorch_trainer)
file(REMOVE_RECURSE ${area})
