#pragma once
// Guards of an engine's layers as Python objects, and views of the tensors that they hold.
// A view keeps its guard. What another library makes of a view, an array or a tensor, keeps the guard too and is
// counted: a guard is not released while one is alive, so that an array never shows the memory of another layer.
#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "python/bindings/cells.hpp"

namespace tandem::python {

/// DLPack's number for "the consumer orders its work itself".
inline constexpr std::int64_t no_order = -1;

/// Owner of the memory that views show.
class ViewOwner {
 public:
  virtual ~ViewOwner() = default;
  /// "weights of layer 'h.0'"
  virtual std::string text() const = 0;
  /// Throws MisuseError once the memory is given back.
  virtual void require_held(const std::string& what) const = 0;
  virtual bool is_weights() const noexcept = 0;
  /// Device of its memory. Throws as require_held.
  virtual DeviceCell& device() const = 0;
  /// Orders work of a consumer of DLPack after what fills the memory: on the host waits for it, on a GPU accepts the
  /// streams that can be made to wait, and no other (BufferError).
  virtual void order_for(nb::handle consumer_stream) = 0;
  /// Owner for what another library makes of a view.
  virtual nb::capsule array_owner() = 0;
};

/// A layer's weights or gradients, held until they are released, or nothing refers to them.
class GuardCell : public ViewOwner, public std::enable_shared_from_this<GuardCell> {
 public:
  using Guard = std::variant<std::monostate, WeightsGuard, GradientsGuard>;
  GuardCell(std::shared_ptr<EngineCell> engine, std::shared_ptr<StreamCell> stream, int layer, Guard guard);
  ~GuardCell() override;
  GuardCell(const GuardCell&) = delete;
  GuardCell& operator=(const GuardCell&) = delete;

  /// View of one parameter; empty for the gradient of a frozen one. Throws MisuseError as the guards of C++ do, and
  /// once released.
  TensorView view(const std::string& name) const;
  void require_held(const std::string& what) const override;
  bool held() const noexcept { return !std::holds_alternative<std::monostate>(guard_); }
  bool is_weights() const noexcept override { return is_weights_; }
  const std::vector<std::string>& names() const noexcept { return names_; }
  std::string text() const override;

  void also_used_on(const std::shared_ptr<StreamCell>& stream);
  void leave_out(const std::string& name);
  /// Copies `bytes` bytes of the caller's on the host into the gradient of one parameter, on the calling thread, once
  /// the buffer is there. Throws MisuseError for weights, a frozen parameter, another size, and on a GPU.
  void copy_in(const std::string& name, const void* from, std::size_t bytes);
  /// Ends of the guard. Both throw MisuseError while arrays made of views are alive, unless forced.
  void release(bool forced);
  void commit(const std::shared_ptr<StreamCell>& stream, bool forced);
  /// Releases a guard that a Python exception passes, which abandons the step as an exception of C++ does. What arrays
  /// of it show from then on is undefined.
  void release_by_exception();

  DeviceCell& device() const override;
  /// Stream of the request. Throws MisuseError once released.
  std::shared_ptr<StreamCell> stream() const;
  void order_for(nb::handle consumer_stream) override;
  nb::capsule array_owner() override;

 private:
  struct Array;
  void require_no_arrays(const char* what) const;
  void drop(bool unwinding) noexcept;

  Counted counted_{live().guards};
  std::shared_ptr<EngineCell> engine_;  ///< null once released
  std::vector<std::shared_ptr<StreamCell>>
      streams_;  ///< the stream of the request, then others that were used; empty once released
  std::string layer_;
  std::vector<std::string> names_;
  bool is_weights_;
  Guard guard_;
  Event filled_;  ///< on the host device: the memory has its contents
  std::atomic<int> arrays_{0};
  long process_ = this_process();
};

/// View of one tensor. `view.data` is valid while its owner holds the memory.
struct Tensor {
  std::shared_ptr<ViewOwner> owner;
  std::string name;
  TensorView view;
};

}  // namespace tandem::python
