#pragma once
// The safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes. A file is not
// believed: every length and offset is checked before it is used.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mapped_file.hpp"
#include "io/atomic_file.hpp"

namespace tandem {

/// A tensor as it lies in a mapped file.
struct StoredTensor {
  std::string dtype;  ///< "F32", "F16", "BF16", ... as the file says
  std::vector<std::int64_t> shape;
  std::int64_t count = 0;
  std::span<const std::byte> bytes;  ///< valid while the reader lives; alignment is not promised
  std::uint64_t begin = 0;           ///< place of its bytes in the file
};

/// Whether elements are of less than 16 bits and no integers, or complex: types of quantized models and their scales.
bool is_narrow_or_complex(std::string_view dtype);

/// Widens `tensor` (F32, F16 or BF16) into `values`, from element `first` on. Throws InputError on
/// another type, MisuseError out of range.
void widen(const StoredTensor& tensor, std::int64_t first, std::span<float> values);

class SafetensorsReader {
 public:
  /// Maps the file and checks the header whole: its length, JSON without repeated names, types of known size,
  /// shapes whose product does not overflow and agrees with the offsets, offsets inside the file,
  /// ascending, without overlap or gap. Throws InputError that names the file and the tensor.
  explicit SafetensorsReader(const std::filesystem::path& file);

  const std::map<std::string, StoredTensor>& tensors() const noexcept { return tensors_; }
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Null where there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  const std::filesystem::path& path() const noexcept { return file_.path(); }

 private:
  void parse();
  MappedFile file_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor yet to be written.
struct TensorSpec {
  std::string name;
  std::string dtype;  ///< "F32" or "BF16"
  std::vector<std::int64_t> shape;
};

/// Writes the header at once, then the tensors' bytes in the order of `specs`, in pieces of any size.
class SafetensorsWriter {
 public:
  /// Throws WriteError.
  SafetensorsWriter(const std::filesystem::path& file, const std::vector<TensorSpec>& specs,
                    const std::map<std::string, std::string>& metadata = {}, FileOps& ops = system_files());
  void write(const void* data, std::size_t bytes) { file_.write(data, bytes); }
  /// Flushes and closes. Throws MisuseError where more or fewer bytes came than announced.
  void finish();
  std::uint64_t bytes() const noexcept { return file_.bytes(); }
  std::string hash() const { return file_.hash(); }

 private:
  FileWriter file_;
  std::uint64_t expected_ = 0;
};

}  // namespace tandem
