# Kernels of the CUDA device and what is made of them; included by CMakeLists.txt of this folder.
#   tandem_cuda_kernels(TARGET)   adds them to TARGET, compiled by nvcc, with the matrix products of cuBLASLt and, where the
#                                 build has its headers, the attention of cuDNN
#   tandem_gpu_ops_emulated       the same text compiled by the C++ compiler (emulation/), plain matrix products and attention
# Who links the latter also provides native_stream() and emulation::enqueue(), in a library named after it:
# tandem_gpu_emulation_immediate runs a kernel where it is launched.
set(gpu_kernels_dir ${CMAKE_CURRENT_LIST_DIR})
set(gpu_kernel_sources attention.cu attention_backward.cu attention_tensor.cu attention_tensor_backward.cu cached.cu columns.cu decode.cu dropout.cu embedding.cu expert_products.cu
                       expert_products_tensor.cu experts.cu fp8.cu matmul.cu norms.cu norms_backward.cu pointwise.cu preference.cu softmax.cu update.cu)
list(TRANSFORM gpu_kernel_sources PREPEND ${gpu_kernels_dir}/kernels/)
set(gpu_ops_sources attention.cpp cuda_ops.cpp head_loss.cpp)
list(TRANSFORM gpu_ops_sources PREPEND ${gpu_kernels_dir}/ops/)
# Who multiplies and who attends: a file answers for each.
set(gpu_cublaslt_sources ${gpu_kernels_dir}/ops/matmul_cublaslt.cpp ${gpu_kernels_dir}/ops/matmul_parts.cpp)
if(TANDEM_CUDNN_FOUND)
  set(gpu_attention_sources $<TARGET_OBJECTS:tandem_attention_cudnn>)
else()
  set(gpu_attention_sources ${gpu_kernels_dir}/ops/attention_plain.cpp)
endif()

# CMake 3.25 does not know this flag of nvcc.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
if(TANDEM_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TANDEM_CCACHE})
endif()

# No contraction: every fused multiply-add of a kernel is explicit, as on the CPU. A kernel whose registers spill to
# memory, or whose arrays lie there, is an error where that is under our control: for the architectures and the toolkit
# that the kernels were made with. Elsewhere it is slower, and no reason to refuse a build: what warns is an error
# (tandem_flags), so that there nobody asks for a warning.
set(gpu_kernel_flags -fmad=false --expt-relaxed-constexpr)
set(gpu_kernel_flags_elsewhere ${gpu_kernel_flags} CACHE INTERNAL "nvcc flags of the kernels where they may spill")
set(may_spill ON)
if("${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "80-real;90" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.1)
  list(APPEND gpu_kernel_flags -Xptxas=-warn-spills,-warn-lmem-usage -Werror=all-warnings)
  set(may_spill OFF)
endif()
set(gpu_kernels_may_spill ${may_spill} CACHE INTERNAL "Whether a kernel whose registers spill is no error")
set(gpu_kernel_flags ${gpu_kernel_flags} CACHE INTERNAL "nvcc flags of the kernels")
function(tandem_cuda_kernels target)
  target_sources(${target} PRIVATE ${gpu_kernel_sources} ${gpu_ops_sources} ${gpu_cublaslt_sources} ${gpu_attention_sources})
  target_link_libraries(${target} PUBLIC tandem_gpu_scratch)
  target_include_directories(${target} PRIVATE ${gpu_kernels_dir}/cuda)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${gpu_kernel_flags}>")
endfunction()

if(TANDEM_TESTS)
  add_subdirectory(${gpu_kernels_dir}/emulation)
endif()
