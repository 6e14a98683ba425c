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

/// A layer's weights or gradients, held until they are released, or nothing refers to them.
class GuardCell : public std::enable_shared_from_this<GuardCell> {
 public:
  using Guard = std::variant<std::monostate, WeightsGuard, GradientsGuard>;
  GuardCell(std::shared_ptr<EngineCell> engine, std::shared_ptr<StreamCell> stream, int layer, Guard guard);
  ~GuardCell();
  GuardCell(const GuardCell&) = delete;
  GuardCell& operator=(const GuardCell&) = delete;

  /// View of one parameter; empty for the gradient of a frozen one. Throws MisuseError as the guards of C++ do, and
  /// once released.
  TensorView view(const std::string& name) const;
  /// Throws MisuseError once released.
  void require_held(const std::string& what) const;
  bool held() const noexcept { return !std::holds_alternative<std::monostate>(guard_); }
  bool is_weights() const noexcept { return is_weights_; }
  const std::vector<std::string>& names() const noexcept { return names_; }
  /// "weights of layer 'h.0'"
  std::string text() const;

  void also_used_on(const std::shared_ptr<StreamCell>& stream);
  void leave_out(const std::string& name);
  /// Both throw MisuseError while arrays made of views are alive, unless forced.
  void release(bool forced);
  void commit(const std::shared_ptr<StreamCell>& stream, bool forced);
  /// Releases a guard that a Python exception passes, which abandons the step as an exception of C++ does. What arrays
  /// of it show from then on is undefined.
  void release_by_exception();

  /// Device of its memory, and stream of the request. Throw MisuseError once released.
  DeviceCell& device() const;
  std::shared_ptr<StreamCell> stream() const;
  /// Orders work of a consumer of DLPack after what fills the memory: on the host waits for it, on a GPU accepts the
  /// streams that know of the guard, and no other (BufferError).
  void order_for(nb::handle consumer_stream);
  /// Owner for what another library makes of a view.
  nb::capsule array_owner();

 private:
  struct Array;
  void require_no_arrays(const char* what) const;
  void drop(bool unwinding) noexcept;

  Counted counted_{live().guards};
  std::shared_ptr<EngineCell> engine_;  ///< null once released
  std::vector<std::shared_ptr<StreamCell>>
      streams_;  ///< that of the request, then those also used; empty once released
  std::string layer_;
  std::vector<std::string> names_;
  bool is_weights_;
  Guard guard_;
  Event filled_;  ///< on the host device: the memory has its contents
  std::atomic<int> arrays_{0};
  long process_ = this_process();
};

/// View of one tensor of a guard. `view.data` is valid while the guard is held.
struct Tensor {
  std::shared_ptr<GuardCell> guard;
  std::string name;
  TensorView view;
};

}  // namespace tandem::python
