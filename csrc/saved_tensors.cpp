#include "saved_tensors.h"

#include <ATen/ops/empty.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace zcompile {

namespace {

// The parameters of one forward of a unit, as backward gathers them again.
struct Regathered {
  py::function gather;  // fills `tensors`, by `SavedTensorHooks::fill`
  std::vector<at::Tensor> tensors;
};

// A tensor over an unsharded parameter, whose memory does not stay.
struct Note {
  std::shared_ptr<Regathered> unit;
  size_t position;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  bool is_conj;
};

// A tensor that stays as it is. Not itself: a node of autograd that saves its own result would hold itself.
struct Kept {
  at::Tensor detached;
  int64_t version;
};

class SavedTensorHooks {
 public:
  SavedTensorHooks(const std::vector<at::Tensor>& unsharded, py::function gather)
      : open_(std::make_shared<Regathered>(Regathered{std::move(gather), {}})), unit_(open_) {
    for (size_t i = 0; i < unsharded.size(); ++i) positions_.emplace(storage_of(unsharded[i]), i);
  }

  py::object pack(const at::Tensor& tensor) const {
    const auto found = tensor.has_storage() ? positions_.find(storage_of(tensor)) : positions_.end();
    if (found == positions_.end()) return py::cast(Kept{tensor.detach(), tensor._version()});
    TORCH_INTERNAL_ASSERT(open_, "a tensor was saved behind the forward of its unit");
    return py::cast(
        Note{
            open_, found->second, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(),
            tensor.storage_offset(), tensor.is_conj()});
  }

  // From now on only notes hold what backward gathers.
  void close() { open_.reset(); }

  void fill(std::vector<at::Tensor> tensors) const {
    if (const auto unit = unit_.lock()) unit->tensors = std::move(tensors);
  }

 private:
  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  std::shared_ptr<Regathered> open_;
  std::weak_ptr<Regathered> unit_;
  std::unordered_map<const c10::StorageImpl*, size_t> positions_;
};

at::Tensor read(const Note& note) {
  if (note.unit->tensors.empty()) note.unit->gather();
  TORCH_INTERNAL_ASSERT(note.position < note.unit->tensors.size(), "a unit was not gathered again");
  const auto& again = note.unit->tensors[note.position];
  auto view = at::empty({0}, again.options().dtype(note.dtype));
  view.set_(again.storage(), note.offset, note.sizes, note.strides);
  return note.is_conj ? view.conj() : view;
}

// No stream: one that a toolchain links with its own libstdc++ crashes at numbers.
std::string shape_of(const at::Tensor& tensor) {
  std::string text = "[";
  for (const auto size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

at::Tensor unpack(const py::object& saved) {
  if (py::isinstance<Note>(saved)) return read(saved.cast<const Note&>());
  const auto& kept = saved.cast<const Kept&>();
  const auto version = static_cast<int64_t>(kept.detached._version());
  TORCH_CHECK(
      version == kept.version,
      "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
      "shape " +
          shape_of(kept.detached) + " is at version " + std::to_string(version) + "; expected version " +
          std::to_string(kept.version) + " instead.");
  return kept.detached;
}

}  // namespace

void bind_saved_tensors(py::module_& module) {
  py::class_<Kept>(module, "_KeptTensor");
  py::class_<Note>(module, "_TensorNote");
  py::class_<SavedTensorHooks>(module, "SavedTensorHooks")
      .def(py::init<const std::vector<at::Tensor>&, py::function>(), py::arg("unsharded"), py::arg("gather"))
      .def("pack", &SavedTensorHooks::pack, py::arg("tensor"))
      .def("close", &SavedTensorHooks::close)
      .def("fill", &SavedTensorHooks::fill, py::arg("tensors"));
  module.def("unpack_saved_tensor", unpack, py::arg("saved"));
}

}  // namespace zcompile
