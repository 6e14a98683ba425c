# Makes the folder of target `bundle`, and FOLDER.tar.gz of it. Fails where a library is missing or the archive
# is larger than people like to copy.
cmake_policy(SET CMP0057 NEW)  # if(IN_LIST)
set(largest_mib 50)
# What every Linux machine has, and must have of its own version: glibc and its loader.
set(of_the_system "^(ld-linux.*|libc|libm|libdl|libpthread|librt|libresolv|libutil)\\.so\\.[0-9]+$")

file(REMOVE_RECURSE ${FOLDER} ${FOLDER}.tar.gz)
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${PROGRAMS} RESOLVED_DEPENDENCIES_VAR libraries
     UNRESOLVED_DEPENDENCIES_VAR missing PRE_EXCLUDE_REGEXES ${of_the_system})
if(missing)
  message(FATAL_ERROR "bundle: not found: ${missing}")
endif()
foreach(library ${libraries})
  get_filename_component(name ${library} NAME)
  file(REAL_PATH ${library} file)
  configure_file(${file} ${FOLDER}/lib/${name} COPYONLY)
endforeach()
file(COPY ${PROGRAMS} DESTINATION ${FOLDER}/bin)
file(GLOB copied ${FOLDER}/bin/* ${FOLDER}/lib/*)
execute_process(COMMAND ${STRIP} --strip-unneeded ${copied} COMMAND_ERROR_IS_FATAL ANY)
file(COPY ${SOURCE}/scripts/run_gpu_checks ${SOURCE}/LICENSE ${SOURCE}/NOTICE ${SOURCE}/THIRD_PARTY.md
          ${SOURCE}/docs/cuda.md ${SOURCE}/profiles DESTINATION ${FOLDER})
file(GLOB benchmarks ${SOURCE}/bench/*.py)
file(COPY ${benchmarks} ${SOURCE}/bench/data ${SOURCE}/bench/losses ${SOURCE}/bench/peers DESTINATION ${FOLDER}/bench)
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty OUTPUT_VARIABLE commit ERROR_QUIET
                OUTPUT_STRIP_TRAILING_WHITESPACE)
file(WRITE ${FOLDER}/commit "${commit}\n")

get_filename_component(parent ${FOLDER} DIRECTORY)
get_filename_component(name ${FOLDER} NAME)
execute_process(COMMAND ${CMAKE_COMMAND} -E tar czf ${FOLDER}.tar.gz ${name} WORKING_DIRECTORY ${parent}
                COMMAND_ERROR_IS_FATAL ANY)
file(SIZE ${FOLDER}.tar.gz bytes)
math(EXPR mib "(${bytes} + 1048575) / 1048576")
message(STATUS "bundle: ${FOLDER}, ${FOLDER}.tar.gz (${mib} MiB)")
if(mib GREATER largest_mib)
  message(FATAL_ERROR "bundle: ${mib} MiB compressed, ${largest_mib} at most")
endif()
