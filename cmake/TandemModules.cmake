# tandem_headers(NAME LIBRARIES HEADER...)
# Headers that most files of many targets include, compiled once for those that ask tandem_has_headers for them; their flags
# are those of LIBRARIES. Half of what a compiler reads is these. ccache keeps nothing of what was compiled with them: where it
# is used, they are included as written.
function(tandem_headers name libraries)
  if(NOT TANDEM_CCACHE)
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp CONTENT "")
    add_library(${name} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
    target_link_libraries(${name} PRIVATE ${libraries})
    target_precompile_headers(${name} PRIVATE ${ARGN})
  endif()
endfunction()

function(tandem_has_headers target name)
  if(TARGET ${name})
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()

set(tandem_common_headers <algorithm> <atomic> <chrono> <cmath> <condition_variable> <cstring> <filesystem> <functional> <limits>
    <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <utility> <vector>)
tandem_headers(tandem_module_headers "tandem_flags" ${tandem_common_headers})
# Those of the program itself also log, and read and write JSON.
tandem_headers(tandem_program_headers "tandem_flags;spdlog::spdlog;nlohmann_json::nlohmann_json;fmt::fmt"
               ${tandem_common_headers} <spdlog/spdlog.h> <nlohmann/json.hpp>)

# tandem_library(NAME FOLDER [USES library...] [LINKS library...] [EXCLUDE file...] [HEADERS name])
# The sources of a folder as a static library `tandem_NAME`. USES are modules and parts whose headers its own may include,
# without `tandem_`; LINKS are for its sources alone.
function(tandem_library name folder)
  cmake_parse_arguments(M "" "HEADERS" "USES;LINKS;EXCLUDE" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  foreach(file ${M_EXCLUDE})
    list(REMOVE_ITEM sources ${folder}/${file})
  endforeach()
  add_library(tandem_${name} STATIC ${sources})
  target_include_directories(tandem_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  list(TRANSFORM M_USES PREPEND tandem_)
  target_link_libraries(tandem_${name} PUBLIC ${M_USES} PRIVATE $<BUILD_INTERFACE:tandem_flags> ${M_LINKS})
  if(NOT M_HEADERS)
    set(M_HEADERS tandem_module_headers)
  endif()
  tandem_has_headers(tandem_${name} ${M_HEADERS})
endfunction()

# tandem_module(NAME ...): the folder of the caller as one library, with the arguments of tandem_library.
function(tandem_module name)
  tandem_library(${name} ${CMAKE_CURRENT_SOURCE_DIR} ${ARGN})
  set_property(GLOBAL PROPERTY TANDEM_PARTS_${name} ${name})
endfunction()

# tandem_part(MODULE PART ...): the folder PART of a module as a library `tandem_MODULE_PART`, with the arguments of
# tandem_library. Parts are declared in the order in which they include each other.
function(tandem_part module part)
  tandem_library(${module}_${part} ${CMAKE_CURRENT_SOURCE_DIR}/${part} ${ARGN})
  set_property(GLOBAL APPEND PROPERTY TANDEM_PARTS_${module} ${module}_${part})
endfunction()

# tandem_module_of_parts(NAME): `tandem_NAME`, which links all parts that were declared.
function(tandem_module_of_parts name)
  get_property(parts GLOBAL PROPERTY TANDEM_PARTS_${name})
  add_library(tandem_${name} INTERFACE)
  list(TRANSFORM parts PREPEND tandem_)
  target_link_libraries(tandem_${name} INTERFACE ${parts})
  set_property(GLOBAL APPEND PROPERTY TANDEM_PARTS_${name} ${name})
endfunction()

# tandem_test_objects(NAME SOURCE...): tests that several programs run, each on a device of its own; compiled once.
function(tandem_test_objects name)
  add_library(${name} OBJECT ${ARGN})
  tandem_is_test(${name})
  target_link_libraries(${name} PRIVATE tandem_core)
endfunction()

# tandem_test(NAME [USES module...] [LINKS library...] [FOLDERS folder...] ...): *.cpp of the caller's folder, and of those
# named in it, as one program `NAME_test`, its suites run by CTest; what else is given goes to tandem_suites. LINKS may name
# objects of tandem_test_objects, whose sources are then not compiled again.
function(tandem_test name)
  cmake_parse_arguments(T "" "TIMEOUT" "USES;LINKS;FOLDERS;CASES;LONG;SLOW;ADDRESS;THREAD;SLOW_SANITIZED;SHARDS;ENVIRONMENT" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  foreach(folder ${T_FOLDERS})
    file(GLOB more CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND sources ${more})
  endforeach()
  foreach(library ${T_LINKS})
    get_target_property(elsewhere ${library} SOURCES)
    list(REMOVE_ITEM sources ${elsewhere})
  endforeach()
  add_executable(${name}_test ${sources})
  # Others are compiled once more by some test, and would be there twice.
  set(inlines ${T_USES})
  list(FILTER inlines INCLUDE REGEX "^(core|cpu_ops)$")
  tandem_inlines_from(${name}_test ${inlines} ${T_LINKS})
  list(TRANSFORM T_USES PREPEND tandem_)
  target_compile_definitions(${name}_test PRIVATE TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  tandem_is_test(${name}_test)
  target_link_libraries(${name}_test PRIVATE ${T_USES} ${T_LINKS} GTest::gtest_main)
  set(suites "")
  foreach(option CASES LONG SLOW ADDRESS THREAD SLOW_SANITIZED SHARDS ENVIRONMENT TIMEOUT)
    if(T_${option})
      list(APPEND suites ${option} ${T_${option}})
    endif()
  endforeach()
  tandem_suites(${name}_test ${name} ${suites})
endfunction()
include(TandemSuites)
