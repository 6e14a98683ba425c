# cmake -D SOURCE=... -D BUILD=... -D COMPILER=... -D GENERATOR=... -P install_test.cmake
# Installs BUILD into a prefix of its own, builds a copy of examples/custom_trainer against it, and runs it.
include(${CMAKE_CURRENT_LIST_DIR}/area.cmake)

run("install" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${area}/prefix)

foreach(text bash-completion/completions/tandem zsh/site-functions/_tandem fish/vendor_completions.d/tandem.fish
             man/man1/tandem.1)
  file(READ ${area}/prefix/share/${text} content)
  if(NOT content MATCHES "tandem")
    leave("${text} was not installed")
  endif()
endforeach()

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
# Names of tandem's own headers are free.
foreach(header core/base/error.hpp core/device/device.hpp offload/engine.hpp scheduler/plan/plan.hpp api/open_device.hpp)
  file(WRITE ${area}/own/${header} "#error a header of the program's own\n")
endforeach()
run("configure" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${area}/custom_trainer -B ${area}/build
    -DCMAKE_PREFIX_PATH=${area}/prefix
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS=-I${area}/own")
run("build" ${CMAKE_COMMAND} --build ${area}/build)
run("train" ${area}/build/custom_trainer)

# The README's code, with what it leaves to the reader.
file(READ ${SOURCE}/README.md readme)
string(REGEX MATCH "```cpp\n(.*using namespace tandem::literals;\n)" ignored "${readme}")
set(head "${CMAKE_MATCH_1}")
string(REGEX MATCH "using namespace tandem::literals;\n([^`]*)```" ignored "${readme}")
file(WRITE ${area}/readme/readme.cpp "#include <cstdint>\n#include <span>\n${head}
constexpr std::int64_t width = 33;
void my_values(const tandem::Parameter&, std::span<float> values) { for (float& value : values) value = 0.5F; }
void my_forward_and_backward(tandem::TensorView, tandem::TensorView, tandem::TensorView, tandem::TensorView,
                             tandem::StreamView) {}
int main() {
${CMAKE_MATCH_1}
  return report.step == 1 && !report.skipped ? 0 : 1;
}
")

# The code on embedding (no backtick in it): a plan that is chosen for a machine, which is run, and all else, which is compiled.
file(READ ${SOURCE}/docs/embedding.md embedding)
function(code_that_begins text variable)
  string(FIND "${embedding}" "```cpp\n${text}" begin)
  if(begin EQUAL -1)
    leave("docs/embedding.md has no code that begins with ${text}")
  endif()
  math(EXPR begin "${begin} + 7")
  string(SUBSTRING "${embedding}" ${begin} -1 rest)
  string(FIND "${rest}" "```" end)
  string(SUBSTRING "${rest}" 0 ${end} code)
  set(${variable} "${code}" PARENT_SCOPE)
endfunction()
code_that_begins("const double norm = " own_end)
code_that_begins("engine.begin_step({.lr = lr, .micro_batches = most" open_ended)
code_that_begins("engine.begin_step({.lr = lr, .absent = " absent)
code_that_begins("std::vector<tandem::Device*> devices" several)
string(REGEX MATCH "```cpp\n(#include <tandem/planning.hpp>\n)([^`]*)```" ignored "${embedding}")
set(head "${CMAKE_MATCH_1}")
set(chosen "${CMAKE_MATCH_2}")
string(REGEX MATCH "```cpp\n(cudaStream_t [^`]*)```" ignored "${embedding}")
file(WRITE ${area}/readme/embedding.cpp "#include <cmath>\n#include <iostream>\n#include <optional>\n#include <vector>\n${head}
void an_end_of_its_own(tandem::OffloadEngine& engine, double norm_of_mine, double limit, double (*schedule)(int), int step) {
${own_end}
}
struct Batch { bool last; };
std::optional<Batch> next_batch() { return {}; }
void forward_and_backward(const Batch&) {}
void a_number_that_is_open(tandem::OffloadEngine& engine, double lr, int most) {
${open_ended}
}
void layers_that_are_absent(tandem::OffloadEngine& engine, double lr, int layer, tandem::StreamView stream) {
${absent}
}
std::vector<tandem::Device*> my_devices() { return {}; }
void several_devices(const tandem::ParameterLayout& layout, tandem::OffloadOptions options,
                     const tandem::PlanningFacts& facts, std::size_t rank) {
${several}
}
struct CUstream_st;
using cudaStream_t = CUstream_st*;
constexpr unsigned cudaStreamNonBlocking = 1;
int cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return 0; }
void my_kernel(cudaStream_t, void*) {}
void on_a_gpu(tandem::Device* device, tandem::OffloadEngine& engine) {
${CMAKE_MATCH_1}
}
int main() {
  const double tokens = 2048;
  const auto device = tandem::open_device(\"host\", {.memory = std::size_t{64} << 20});
  tandem::ParameterLayout layout;
  for (const char* name : {\"h.0\", \"h.1\", \"h.2\"}) layout.add_layer(name).add(\"w1\", {512, 512});
  tandem::OffloadOptions options;
${chosen}
  const bool told = choice.simulation.step_seconds > 0.0 && choice.candidates.size() > 3;
  return told && engine.plan().chosen_by_auto ? 0 : 1;
}
")
file(COPY_FILE ${SOURCE}/profiles/24gb-pcie4.toml ${area}/readme/machine.toml)
file(WRITE ${area}/readme/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(readme LANGUAGES CXX)
find_package(tandem CONFIG REQUIRED)
foreach(program readme embedding)
  add_executable(\${program} \${program}.cpp)
  target_link_libraries(\${program} tandem::tandem)
endforeach()
")
run("configure the code of the pages" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${area}/readme -B ${area}/readme/build
    -DCMAKE_PREFIX_PATH=${area}/prefix -DCMAKE_CXX_COMPILER=${COMPILER})
run("build the code of the pages" ${CMAKE_COMMAND} --build ${area}/readme/build)
run("run the README's code" ${CMAKE_COMMAND} -E chdir ${area}/readme ${area}/readme/build/readme)
run("run the code on embedding" ${CMAKE_COMMAND} -E chdir ${area}/readme ${area}/readme/build/embedding)
run("installed program" ${area}/prefix/bin/tandem --version)
file(REMOVE_RECURSE ${area})
