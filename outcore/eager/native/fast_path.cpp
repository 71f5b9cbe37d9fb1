// Ops and saved tensors of a planned step -> the same, without Python where the plan asks for nothing unusual.
//
// A planned step sees every op of its forward, because a plan names its ops by their order, and every tensor that
// autograd saves. In Python that costs 6 to 10 microseconds an op, 12 to 30 where its call is captured, and 4 a saved
// tensor. Here ops that the plan asks nothing of are counted, and captured calls and saved tensors become the very
// objects that `outcore.eager.captures` and `FollowedPlan.pack` make: what is done with them later is Python's.
//
// Whatever is not ordinary goes to Python before anything was changed: another op than planned, an op that writes, a
// tensor that is no plain tensor or not the one that the plan means, an active mode, a changed switch, another thread.
//
// References to Python objects are made and given up while the GIL is held. What belongs to a step (`Position`) refers
// to nothing that refers to it. `outcore.eager.native` compiles this file; `outcore.eager.fast_path` alone uses it.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <structmember.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// Where PyTorch calls us, where ops that write are watched, and where PyTorch never looks: our kernels in Python.
// (`outcore.memory.tensors` and `outcore.eager.intercept` name the same keys.)
constexpr DispatchKey kOps = DispatchKey::Fake;
constexpr DispatchKey kWrites = DispatchKey::DeferredInit;
constexpr Py_ssize_t kNumFewSwitches = 3;  // `outcore.eager.switches`
constexpr DispatchKey kInPython = DispatchKey::TESTING_ONLY_GenericMode;
const c10::DispatchKeySet kWatched = c10::DispatchKeySet({kOps, kWrites});
const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kOps);

// -- Python objects -----------------------------------------------------------------------------------------------------

[[noreturn]] void raise_python_error() {
  python_error error;
  error.persist();
  throw python_error(std::move(error));
}

void check(bool is_done) {
  if (!is_done) {
    raise_python_error();
  }
}

// A reference that is owned. It is given up only while the GIL is held.
class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* stolen) : object_(stolen) {
    check(stolen != nullptr || PyErr_Occurred() == nullptr);
  }
  static Owned shared(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Owned(borrowed);
  }
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    PyObject* before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    Py_XDECREF(object_);
  }
  PyObject* get() const {
    return object_;
  }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_ = nullptr;
};

Owned number(int64_t value) {
  return Owned(PyLong_FromLongLong(value));
}

Owned boolean(bool value) {
  return Owned::shared(value ? Py_True : Py_False);
}

Owned weak(PyObject* object) {
  return Owned(PyWeakref_NewRef(object, nullptr));
}

Owned referent(PyObject* mark) {
  Owned object(PyObject_CallNoArgs(mark));
  return object.get() == Py_None ? Owned() : std::move(object);
}

PyObject* found_in(const Owned& dict, PyObject* key) {  // borrowed; null: nothing
  PyObject* found = PyDict_GetItemWithError(dict.get(), key);
  check(found != nullptr || PyErr_Occurred() == nullptr);
  return found;
}

void put_in(PyObject* dict, PyObject* key, const Owned& value) {
  check(PyDict_SetItem(dict, key, value.get()) == 0);
}

// An attribute that a Python class keeps in `__slots__`, where it lies.
class Slot {
 public:
  Slot(PyTypeObject* type, const char* name) {
    Owned descriptor(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
    TORCH_CHECK(Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type), name, " is no slot");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
  }
  PyObject* get(PyObject* object) const {  // borrowed
    return place(object);
  }
  bool is_none(PyObject* object) const {
    return get(object) == Py_None;
  }
  void set(PyObject* object, Owned value) const {
    PyObject* before = place(object);
    place(object) = value.release();
    Py_XDECREF(before);
  }
  void set(PyObject* object, PyObject* value) const {
    set(object, Owned::shared(value));
  }

 private:
  PyObject*& place(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

// The classes of `outcore.eager.cells` and `outcore.eager.replay` whose objects are made here.
struct Classes {
  explicit Classes(const py::dict& given) : given_(given) {}

 private:
  py::dict given_;
  PyTypeObject* type(const char* name) const {
    py::object found = given_[name];
    TORCH_CHECK(PyType_Check(found.ptr()), name, " is no class");
    return reinterpret_cast<PyTypeObject*>(found.release().ptr());
  }

 public:
  PyTypeObject *tensor = type("Tensor"), *parameter = type("Parameter"), *cell = type("Cell"), *ref = type("Ref"),
               *recipe = type("Recipe"), *held = type("Held"), *handle = type("Handle"), *kept = type("Kept");
  Slot conj{ref, "conj"}, neg{ref, "neg"}, dtype{ref, "dtype"}, size{ref, "size"}, stride{ref, "stride"},
      offset{ref, "offset"};  // of `View`, which the next two extend
  Slot ref_cell{ref, "cell"};
  Slot handle_source{handle, "source"}, handle_cell{handle, "cell"}, handle_home{handle, "home"},
      handle_pack{handle, "pack"}, handle_run{handle, "run"};
  Slot cell_value{cell, "value"}, cell_num_bytes{cell, "num_bytes"}, cell_version{cell, "version"},
      cell_data{cell, "data"}, cell_parcel{cell, "parcel"}, cell_recipe{cell, "recipe"}, cell_held{cell, "held"},
      cell_follows{cell, "follows"}, cell_is_saved{cell, "is_saved"}, cell_is_read{cell, "is_read"},
      cell_fetched{cell, "fetched"}, cell_lent{cell, "lent"};
  Slot recipe_op{recipe, "op"}, recipe_func{recipe, "func"}, recipe_signature{recipe, "signature"},
      recipe_args{recipe, "args"}, recipe_kwargs{recipe, "kwargs"}, recipe_grad_mode{recipe, "grad_mode"},
      recipe_switches{recipe, "switches"}, recipe_statistics{recipe, "statistics"}, recipe_inner{recipe, "inner"},
      recipe_result{recipe, "result"}, recipe_generator_state{recipe, "generator_state"}, recipe_made{recipe, "made"},
      recipe_overwrote{recipe, "overwrote"};
  Slot held_tensor{held, "tensor"}, held_storage{held, "storage"}, held_state{held, "state"}, held_cell{held, "cell"},
      held_view{held, "view"};
  Slot kept_source{kept, "source"}, kept_tensor{kept, "tensor"}, kept_version{kept, "version"},
      kept_pack{kept, "pack"}, kept_run{kept, "run"};
  PyObject* mark = PyUnicode_InternFromString(py::cast<std::string>(given_["mark"]).c_str());
  Owned nobody = Owned::shared(py::object(given_["NOBODY"]).ptr());
  Owned sources = Owned::shared(py::object(given_["sources"]).ptr());  // of weights that may be away
  Owned asked = Owned::shared(py::object(given_["asked"]).ptr());      // functions that tell the switches
  Owned compiler = Owned::shared(py::object(given_["compiler"]).ptr());  // tells whether a compiler is near; or None
  std::vector<std::string> between = py::cast<std::vector<std::string>>(given_["between"]);
  Owned not_held = Owned(Py_BuildValue("(ii)", 0, 0)), nothing = Owned(PyTuple_New(0));

  bool are_plain(PyObject* wrapped) const {
    return Py_IS_TYPE(wrapped, tensor) || Py_IS_TYPE(wrapped, parameter);
  }
};

const Classes* classes = nullptr;  // never freed: Python may be gone before this library is

// -- tensors ------------------------------------------------------------------------------------------------------------

// Whether a kernel below sees nothing but tensors with memory: no wrapper, no compiler's stand-in.
bool has_memory(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return !tensor.defined() || (!impl->is_python_dispatch() && !impl->is_meta() && !impl->has_symbolic_sizes_strides());
}

bool have_memory(c10::ArrayRef<IValue> given) {
  for (const IValue& argument : given) {
    if (argument.isTensor()) {
      if (!has_memory(argument.toTensor())) {
        return false;
      }
    } else if (argument.isTensorList()) {
      auto tensors = argument.toTensorList();
      for (size_t at = 0; at < tensors.size(); ++at) {
        if (!has_memory(tensors[at])) {
          return false;
        }
      }
    } else if (argument.isList() && !argument.isIntList() && !argument.isDoubleList() && !argument.isBoolList()) {
      return false;  // a list of what may be tensors
    } else if (argument.isDevice() && argument.toDevice().is_meta()) {
      return false;
    }
  }
  return true;
}

// Whether a tensor may be captured or saved here: all that it is lies on a storage, and Python sees a plain tensor.
bool is_ordinary(const at::Tensor& tensor, PyObject* wrapped) {
  return classes->are_plain(wrapped) && tensor.layout() == at::kStrided && tensor.has_storage() &&
      !tensor.is_nested() && !tensor.is_inference() && has_memory(tensor);
}

Owned storage_of(const at::Tensor& tensor) {
  return Owned(THPStorage_Wrap(tensor.storage()));
}

PyObject* dict_of(const Owned& storage) {  // which the storage keeps
  return Owned(PyObject_GenericGetDict(storage.get(), nullptr)).get();
}

int64_t address_of(const at::Tensor& tensor) {  // of its storage; 0: it has no bytes, or nobody may ask for them
  const auto& data = tensor.storage().data_ptr();
  return c10::impl::cow::is_cow_data_ptr(data) ? 0 : reinterpret_cast<int64_t>(data.get());
}

Owned identity_of(const at::Tensor& tensor) {  // `storage._cdata`
  return Owned(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
}

// What `outcore.eager.cells.alias` makes: without its graph, with its version counter.
Owned alias_of(const at::Tensor& tensor, PyObject* wrapped) {
  if (tensor.grad_fn() == nullptr) {
    return Owned::shared(wrapped);
  }
  auto alone = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/true);
  alone->set_autograd_meta(nullptr);
  return Owned(THPVariable_Wrap(at::Tensor(std::move(alone))));
}

// How a tensor lay the last time, as Python objects: it mostly lies the same way in the next step.
struct Lies {
  std::vector<int64_t> sizes, strides;
  int64_t offset = -1;
  at::ScalarType dtype = at::ScalarType::Undefined;
  Owned py_size, py_stride, py_offset, py_dtype;

  void see(const at::Tensor& tensor, PyObject* wrapped) {
    if (offset == tensor.storage_offset() && dtype == tensor.scalar_type() && tensor.sizes() == sizes &&
        tensor.strides() == strides) {
      return;
    }
    py_size = Owned(PyObject_CallMethod(wrapped, "size", nullptr));
    py_stride = Owned(PyObject_CallMethod(wrapped, "stride", nullptr));
    py_offset = number(tensor.storage_offset());
    py_dtype = Owned::shared(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
    sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
    offset = tensor.storage_offset(), dtype = tensor.scalar_type();
  }
};

Owned instance(PyTypeObject* type) {
  return Owned(type->tp_alloc(type, 0));
}

// A `View`: what `Ref` and `Handle` begin with.
Owned view_of(PyTypeObject* type, const at::Tensor& tensor, PyObject* wrapped, Lies& lies) {
  lies.see(tensor, wrapped);
  Owned view = instance(type);
  classes->conj.set(view.get(), boolean(tensor.is_conj()));
  classes->neg.set(view.get(), boolean(tensor.is_neg()));
  classes->dtype.set(view.get(), lies.py_dtype.get());
  classes->size.set(view.get(), lies.py_size.get());
  classes->stride.set(view.get(), lies.py_stride.get());
  classes->offset.set(view.get(), lies.py_offset.get());
  return view;
}

Owned cell_for(PyObject* value, const at::Tensor& tensor, PyObject* recipe) {
  Owned cell = instance(classes->cell);
  PyObject* it = cell.get();
  classes->cell_value.set(it, value);
  classes->cell_num_bytes.set(it, number(static_cast<int64_t>(tensor.storage().nbytes())));
  classes->cell_version.set(it, number(tensor.is_inference() ? 0 : tensor._version()));
  classes->cell_data.set(it, Py_None);
  classes->cell_parcel.set(it, Py_None);
  classes->cell_recipe.set(it, recipe);
  classes->cell_held.set(it, classes->not_held.get());
  classes->cell_follows.set(it, Py_False);
  classes->cell_is_saved.set(it, Py_False);
  classes->cell_lent.set(it, Py_None);
  classes->cell_is_read.set(it, Py_False);
  classes->cell_fetched.set(it, Py_False);
  return cell;
}

// -- arguments ----------------------------------------------------------------------------------------------------------

// The arguments of a call that are no tensors, as Python objects, and where the tensors go.
struct Arguments {
  std::vector<IValue> numbers;    // every argument that is no tensor; None in the place of one that is
  std::vector<uint32_t> tensors;  // positions of arguments that are tensors, or lists of tensors
  Owned args, kwargs;             // with None in the place of tensors
};

enum class Alike { kNo, kYes, kUnknown };

// Whether two arguments are the same to the bit. Unknown kinds are not compared.
Alike alike(const IValue& one, const IValue& other) {
  auto told = [](bool is_same) { return is_same ? Alike::kYes : Alike::kNo; };
  if (one.isNone() || other.isNone()) {
    return told(one.isNone() && other.isNone());
  }
  if (one.isInt()) {
    return told(other.isInt() && one.toInt() == other.toInt());
  }
  if (one.isBool()) {
    return told(other.isBool() && one.toBool() == other.toBool());
  }
  if (one.isDouble()) {
    double first = one.toDouble(), second = other.isDouble() ? other.toDouble() : 0.0;
    return told(other.isDouble() && std::memcmp(&first, &second, sizeof(double)) == 0);
  }
  if (one.isIntList()) {
    return told(other.isIntList() && one.toIntVector() == other.toIntVector());
  }
  if (one.isBoolList()) {
    return told(other.isBoolList() && one.toBoolList() == other.toBoolList());
  }
  if (one.isDevice()) {
    return told(other.isDevice() && one.toDevice() == other.toDevice());
  }
  if (one.isString()) {
    return told(other.isString() && one.toStringRef() == other.toStringRef());
  }
  return Alike::kUnknown;
}

bool is_tensors(const IValue& argument) {
  return argument.isTensor() || argument.isTensorList();
}

// A number in a tensor's place (`x * 0.5`) is a number to Python, and a tensor that is not given is None.
IValue as_in_python(const IValue& argument) {
  if (!argument.isTensor()) {
    return argument;
  }
  const at::Tensor& tensor = argument.toTensor();
  if (!tensor.defined()) {
    return IValue();
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.is_cpu()) {
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      case at::kLong:
        return *tensor.const_data_ptr<int64_t>();
      case at::kBool:
        return *tensor.const_data_ptr<bool>();
      default:
        break;
    }
  }
  return argument;
}

// An argument that is no tensor, as the kernels in Python get it.
Owned to_python(const IValue& argument, const c10::Argument& described) {
  if (argument.isNone()) {
    return Owned::shared(Py_None);
  }
  auto type = described.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType:
      return Owned::shared(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(argument.toInt()))));
    case c10::TypeKind::LayoutType:
      return Owned::shared(reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<c10::Layout>(argument.toInt()))));
    case c10::TypeKind::MemoryFormatType:
      return Owned(py::cast(static_cast<c10::MemoryFormat>(argument.toInt())).release().ptr());
    default:
      return Owned(torch::jit::toPyObject(argument).release().ptr());
  }
}

// Converts the arguments of a call, leaving out those at the end that have their default value, as PyTorch does for
// kernels in Python. Nothing, if an argument is of a kind that is not known here.
std::optional<Arguments> converted(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> given) {
  const auto& described = schema.arguments();
  Arguments result;
  size_t num_positional = 0, num_args = 0;
  std::vector<bool> is_default(given.size());
  for (size_t at = 0; at < given.size(); ++at) {
    const IValue argument = as_in_python(given[at]);
    bool has_tensors = is_tensors(argument), is_keyword = described[at].kwarg_only();
    if (has_tensors ? is_keyword : alike(argument, argument) == Alike::kUnknown) {
      return std::nullopt;
    }
    if (has_tensors) {
      result.tensors.push_back(at);
    } else if (const auto& usual = described[at].default_value(); usual.has_value()) {
      is_default[at] = alike(*usual, argument) == Alike::kYes;
    }
    result.numbers.push_back(has_tensors ? IValue() : argument);
    if (!is_keyword) {
      num_positional = at + 1;
      num_args = is_default[at] ? num_args : at + 1;
    }
  }
  result.args = Owned(PyList_New(num_args));
  for (size_t at = 0; at < num_args; ++at) {
    PyList_SET_ITEM(result.args.get(), at, to_python(result.numbers[at], described[at]).release());
  }
  result.kwargs = Owned(PyDict_New());
  for (size_t at = num_positional; at < given.size(); ++at) {
    if (!is_default[at]) {
      Owned argument = to_python(result.numbers[at], described[at]);
      check(PyDict_SetItemString(result.kwargs.get(), described[at].name().c_str(), argument.get()) == 0);
    }
  }
  return result;
}

bool are_alike(const Arguments& known, c10::ArrayRef<IValue> given) {
  size_t num_tensors = 0;
  for (size_t at = 0; at < given.size(); ++at) {
    const IValue argument = as_in_python(given[at]);
    if (is_tensors(argument)) {
      if (num_tensors >= known.tensors.size() || known.tensors[num_tensors++] != at) {
        return false;
      }
    } else if (alike(known.numbers[at], argument) != Alike::kYes) {
      return false;
    }
  }
  return num_tensors == known.tensors.size();
}

template <class Visit>
void for_each_tensor(const Arguments& known, c10::ArrayRef<IValue> given, const Visit& visit) {
  for (uint32_t position : known.tensors) {
    if (given[position].isTensor()) {
      visit(given[position].toTensor());
    } else {
      auto tensors = given[position].toTensorList();
      for (size_t at = 0; at < tensors.size(); ++at) {
        visit(at::Tensor(tensors[at]));
      }
    }
  }
}

// -- what is known of a program -----------------------------------------------------------------------------------------

enum class Kind : uint8_t { kGoesToPython, kPasses, kIsCaptured };

struct Read {
  bool is_outside = false;  // it was there before the step, and needs no cell
  Owned value;
  Lies lies;
};

struct Write {
  bool needs_cell = false;
  Owned value;
};

struct Op {
  const c10::OperatorName* name = nullptr;  // the dispatcher keeps one for each operator
  Kind kind = Kind::kGoesToPython;
  bool is_simple = false, is_random = false, is_fused = false;
  Owned number, func, signature;
  std::vector<Read> reads;
  std::vector<Write> writes;
  std::optional<Arguments> arguments;  // of the last call
};

// A tick at which autograd saves a tensor.
struct Pack {
  bool is_ordinary = false, needs_cell = false, is_made_again = false, is_packed_again = false, is_busy = false;
  Owned tick, value, number, dtype, shape;
  Lies lies;
};

struct Table {
  std::vector<Op> ops;
  std::vector<Pack> packs;  // by tick
};

std::optional<c10::OperatorHandle> find_operator(const std::string& full) {
  auto dot = full.find('.', full.find("::"));
  bool has_overload = dot != std::string::npos;
  return c10::Dispatcher::singleton().findSchema(
      {has_overload ? full.substr(0, dot) : full, has_overload ? full.substr(dot + 1) : ""});
}

using Values = std::vector<std::tuple<py::object, bool>>;
using DescribedOp = std::tuple<std::string, bool, bool, bool, bool, py::object, py::object, Values, Values>;
using DescribedPack =
    std::tuple<bool, bool, bool, bool, py::object, py::object, py::object, py::object, py::object>;

Owned owned(const py::object& object) {
  return Owned::shared(object.ptr());
}

std::shared_ptr<Table> make_table(
    const std::vector<std::optional<DescribedOp>>& ops,
    const std::vector<std::optional<DescribedPack>>& packs) {
  auto table = std::make_shared<Table>();
  for (const auto& described : ops) {
    Op& op = table->ops.emplace_back();
    op.number = number(int64_t(table->ops.size()) - 1);
    auto handle = described ? find_operator(std::get<0>(*described)) : std::nullopt;
    if (!handle) {
      continue;
    }
    const auto& [name, is_captured, is_simple, is_random, is_fused, func, signature, reads, writes] = *described;
    op.name = &handle->operator_name();
    op.kind = is_captured ? Kind::kIsCaptured : Kind::kPasses;
    op.is_simple = is_simple, op.is_random = is_random, op.is_fused = is_fused;
    op.func = owned(func), op.signature = owned(signature);
    for (const auto& [value, is_outside] : reads) {
      Read& read = op.reads.emplace_back();
      read.is_outside = is_outside, read.value = owned(value);
    }
    for (const auto& [value, needs_cell] : writes) {
      Write& write = op.writes.emplace_back();
      write.needs_cell = needs_cell, write.value = owned(value);
    }
  }
  for (const auto& described : packs) {
    Pack& pack = table->packs.emplace_back();
    if (described) {
      const auto& [needs_cell, is_made_again, is_packed_again, is_busy, tick, value, number, dtype, shape] = *described;
      pack.is_ordinary = true, pack.needs_cell = needs_cell, pack.is_made_again = is_made_again;
      pack.is_packed_again = is_packed_again, pack.is_busy = is_busy;
      pack.tick = owned(tick), pack.value = owned(value), pack.number = owned(number), pack.dtype = owned(dtype);
      pack.shape = owned(shape);
    }
  }
  return table;
}

// -- one step -----------------------------------------------------------------------------------------------------------

class Position;
thread_local std::weak_ptr<Position> active;  // of the step that runs in this thread

// How far a step is in its program.
class Position {
 public:
  // `step`: the dictionaries and tuples of the step by name; of `run`, `captures` and `plan` it holds weak references.
  Position(std::shared_ptr<Table> table, const py::dict& step)
      : table_(std::move(table)),
        run_(weak(py::object(step["run"]).ptr())),
        captures_(weak(py::object(step["captures"]).ptr())),
        cells_(taken(step, "cells")),
        recipes_(taken(step, "recipes")),
        packed_again_(taken(step, "packed_again")),
        marked_(taken(step, "marked")),
        held_(taken(step, "held")),
        exposed_(taken(step, "exposed")),
        ticks_(taken(step, "ticks")) {}

  ~Position() {
    if (!Py_IsInitialized()) {
      for (Owned* one : everything()) {
        one->release();
      }
      return;
    }
    py::gil_scoped_acquire gil;
    for (Owned* one : everything()) {
      *one = Owned();
    }
  }

  std::atomic<int64_t> num_ops{0};

  bool looks_away = false;  // at writes, until a custom function saves something

  // From here on everything goes to Python.
  void stop() {
    is_on_ = false;
  }

  // Runs an op, if that can be done here.
  bool run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    int64_t index = num_ops, last = int64_t(table_->ops.size()) - 1;
    if (!is_on_ || index > last) {
      return false;
    }
    Op& known = table_->ops[index];
    if (known.kind == Kind::kGoesToPython || known.name != &op.operator_name() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return false;
    }
    if (!have_memory(torch::jit::last(*stack, op.schema().arguments().size()))) {
      return false;
    }
    if (known.kind == Kind::kPasses) {
      num_ops = index + 1;
      op.redispatchBoxed(keys & kBelow, stack);
    } else if (!capture(known, op, keys, stack)) {
      return false;
    }
    if (index == last && is_on_) {
      c10::impl::tls_set_dispatch_key_included(kOps, false);
      c10::impl::tls_set_dispatch_key_included(kWrites, true);
    }
    return true;
  }

  // The handle of a tensor that autograd saves, if it can be made here; the GIL is held.
  Owned pack(PyObject* wrapped) {
    if (!is_on_ || PyDict_GET_SIZE(exposed_.get()) != 0 || !classes->are_plain(wrapped) ||
        (looks_away && is_called_from_torch())) {
      return Owned();
    }
    int64_t tick = int64_t(table_->packs.size()) - PyObject_LengthHint(ticks_.get(), 0);
    Pack* planned = tick < int64_t(table_->packs.size()) ? &table_->packs[tick] : nullptr;
    const at::Tensor& tensor = THPVariable_Unpack(wrapped);
    if (planned == nullptr || !planned->is_ordinary || !is_ordinary(tensor, wrapped) || !is_as(*planned, tensor)) {
      return Owned();
    }
    Owned run = referent(run_.get());
    Owned handle = !run ? Owned()
        : planned->needs_cell ? handle_of(*planned, tensor, wrapped, run.get())
                              : kept(*planned, tensor, wrapped, run.get());
    if (handle) {
      Owned taken(PyIter_Next(ticks_.get()));
      if (planned->is_busy) {
        Owned done(PyObject_CallMethod(run.get(), "follow", "O", planned->tick.get()));
      }
    }
    return handle;
  }

 private:
  static Owned taken(const py::dict& step, const char* name) {
    return Owned::shared(py::object(step[name]).ptr());
  }

  std::vector<Owned*> everything() {
    return {&run_, &captures_, &cells_, &recipes_, &packed_again_, &marked_, &held_, &exposed_, &ticks_, &switches_,
            &few_switches_};
  }

  // Whether the nearest Python may be a custom function's: then Python looks closer.
  static bool is_called_from_torch() {
    PyFrameObject* frame = PyEval_GetFrame();
    if (frame == nullptr) {
      return true;
    }
    Owned code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    const char* file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code.get())->co_filename);
    check(file != nullptr);
    return std::any_of(classes->between.begin(), classes->between.end(), [&](const std::string& folder) {
      return std::strncmp(file, folder.c_str(), folder.size()) == 0;
    });
  }

  std::shared_ptr<Table> table_;
  std::atomic<bool> is_on_{true};
  Owned run_, captures_, cells_, recipes_, packed_again_, marked_, held_, exposed_, ticks_;
  Owned switches_, few_switches_;  // as the step found them: all of them, and those that any op may depend on

  // -- captures ---------------------------------------------------------------------------------------------------------

  bool capture(Op& known, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const auto& schema = op.schema();
    std::vector<c10::StorageImpl*> storages;  // of the arguments
    PyObject* recipe = nullptr;
    {
      py::gil_scoped_acquire gil;
      auto given = torch::jit::last(*stack, schema.arguments().size());
      PyObject* switches = unchanged_switches(known);
      if (switches == nullptr || !knows_arguments(known, schema, given) || !reads_as_planned(known, given)) {
        return false;
      }
      ++num_ops;
      recipe = recipe_of(known, given, switches, storages).release();
    }
    try {
      op.redispatchBoxed(keys & kBelow, stack);
    } catch (...) {
      py::gil_scoped_acquire gil;
      Py_DECREF(recipe);
      throw;
    }
    py::gil_scoped_acquire gil;
    Owned made(recipe);
    if (is_on_) {
      name_results(known, torch::jit::last(*stack, schema.returns().size()), storages, recipe);
    }
    return true;
  }

  // Those that the op may depend on, as they were when the step began; null, if one is another, or a compiler is near.
  PyObject* unchanged_switches(const Op& known) {
    if (classes->compiler.get() != Py_None) {
      Owned compiler(PyObject_CallNoArgs(classes->compiler.get()));
      if (compiler.get() != Py_None) {
        return nullptr;
      }
    }
    if (!switches_) {
      Owned captures = referent(captures_.get());
      switches_ = Owned(PyObject_GetAttrString(captures.get(), "switches"));
      few_switches_ = Owned(PyTuple_GetSlice(switches_.get(), 0, kNumFewSwitches));
    }
    const Owned& expected = known.is_simple ? few_switches_ : switches_;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(expected.get()); ++at) {
      Owned now(PyObject_CallNoArgs(PyTuple_GET_ITEM(classes->asked.get(), at)));
      PyObject* before = PyTuple_GET_ITEM(expected.get(), at);
      if (now.get() != before) {
        int is_same = PyObject_RichCompareBool(now.get(), before, Py_EQ);
        check(is_same >= 0);
        if (is_same == 0) {
          return nullptr;
        }
      }
    }
    return expected.get();
  }

  static bool knows_arguments(Op& known, const c10::FunctionSchema& schema, c10::ArrayRef<IValue> given) {
    if (!known.arguments || !are_alike(*known.arguments, given)) {
      known.arguments = converted(schema, given);
    }
    return known.arguments.has_value() && (!known.is_random || drawn_on(*known.arguments, given).has_value());
  }

  // The device whose generator a random op draws from.
  static std::optional<at::Device> drawn_on(const Arguments& known, c10::ArrayRef<IValue> given) {
    std::optional<at::Device> found;
    for_each_tensor(known, given, [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && (!tensor.is_cpu() || tensor.dim() > 0)) {
        found = tensor.device();
      }
    });
    return found && (found->is_cpu() || found->is_cuda()) ? found : std::nullopt;
  }

  // Whether every tensor is what the plan says: nothing is changed to find out.
  bool reads_as_planned(const Op& known, c10::ArrayRef<IValue> given) const {
    size_t at = 0;
    bool is_planned = true;
    for_each_tensor(*known.arguments, given, [&](const at::Tensor& tensor) {
      is_planned = is_planned && at < known.reads.size() && is_read_as(known.reads[at], tensor);
      ++at;
    });
    return is_planned && at == known.reads.size();
  }

  bool is_read_as(const Read& read, const at::Tensor& tensor) const {
    if (!tensor.defined()) {
      return false;
    }
    Owned wrapped(THPVariable_Wrap(tensor));
    if (!is_ordinary(tensor, wrapped.get())) {
      return false;
    }
    Owned cell = read.is_outside ? Owned() : cell_of_value(read.value.get());
    return !cell || is_on(tensor, storage_of(tensor), cell.get());
  }

  Owned cell_of_value(PyObject* value) const {  // none, if it has none yet
    PyObject* mark = found_in(cells_, value);
    return mark == nullptr ? Owned() : referent(mark);
  }

  // Whether a tensor has the storage and the version that a cell stands for.
  static bool is_on(const at::Tensor& tensor, const Owned& storage, PyObject* cell) {
    PyObject* mark = PyDict_GetItemWithError(dict_of(storage), classes->mark);
    if (mark == nullptr) {
      return false;
    }
    bool is_it = mark == cell || (PyWeakref_Check(mark) && referent(mark).get() == cell);
    return is_it && PyLong_AsLongLong(classes->cell_version.get(cell)) == tensor._version();
  }

  Owned recipe_of(
      Op& known,
      c10::ArrayRef<IValue> given,
      PyObject* switches,
      std::vector<c10::StorageImpl*>& storages) {
    const Arguments& arguments = *known.arguments;
    Owned args(PyList_GetSlice(arguments.args.get(), 0, PyList_GET_SIZE(arguments.args.get())));
    size_t at = 0;
    for (uint32_t position : arguments.tensors) {
      Owned referred;
      if (given[position].isTensor()) {
        referred = refer(known.reads[at++], given[position].toTensor(), storages);
      } else {
        auto tensors = given[position].toTensorVector();
        referred = Owned(PyList_New(tensors.size()));
        for (size_t part = 0; part < tensors.size(); ++part) {
          PyList_SET_ITEM(referred.get(), part, refer(known.reads[at++], tensors[part], storages).release());
        }
      }
      check(PyList_SetItem(args.get(), position, referred.release()) == 0);
    }
    Owned recipe = instance(classes->recipe);
    PyObject* it = recipe.get();
    classes->recipe_op.set(it, known.number.get());
    classes->recipe_func.set(it, known.func.get());
    classes->recipe_signature.set(it, known.signature.get());
    classes->recipe_args.set(it, std::move(args));
    classes->recipe_kwargs.set(it, arguments.kwargs.get());
    classes->recipe_grad_mode.set(it, boolean(at::GradMode::is_enabled()));
    classes->recipe_switches.set(it, switches);
    classes->recipe_statistics.set(it, Py_None);
    classes->recipe_inner.set(it, classes->nothing.get());
    classes->recipe_result.set(it, Py_None);
    classes->recipe_made.set(it, classes->nothing.get());
    classes->recipe_overwrote.set(it, classes->nothing.get());
    classes->recipe_generator_state.set(it, generator_state(known, given));
    return recipe;
  }

  static Owned generator_state(const Op& known, c10::ArrayRef<IValue> given) {
    if (!known.is_random) {
      return Owned::shared(Py_None);
    }
    at::Device device = *drawn_on(*known.arguments, given);
    at::Generator generator = at::globalContext().defaultGenerator(device);
    at::Tensor state;
    {
      std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
    Owned where(THPDevice_New(device)), wrapped(THPVariable_Wrap(state));
    return Owned(PyTuple_Pack(2, where.get(), wrapped.get()));
  }

  // What stands for a tensor that the op reads. Python is asked for what is not ordinary.
  Owned refer(Read& read, const at::Tensor& tensor, std::vector<c10::StorageImpl*>& storages) {
    storages.push_back(tensor.storage().unsafeGetStorageImpl());
    Owned wrapped(THPVariable_Wrap(tensor));
    Owned cell;
    if (read.is_outside) {
      if (Owned held = held_of(tensor, wrapped.get())) {
        return held;
      }
    } else {
      cell = cell_of_value(read.value.get());
    }
    if (!cell) {
      cell = ask("stand_in", read.value.get(), wrapped.get());
      if (!Py_IS_TYPE(cell.get(), classes->cell)) {
        return cell;
      }
    }
    Owned ref = view_of(classes->ref, tensor, wrapped.get(), read.lies);
    classes->cell_is_read.set(cell.get(), Py_True);
    classes->ref_cell.set(ref.get(), std::move(cell));
    return ref;
  }

  Owned ask(const char* method, PyObject* first, PyObject* second) const {
    Owned captures = referent(captures_.get());
    TORCH_CHECK(captures, "the step is over");
    return Owned(PyObject_CallMethod(captures.get(), method, "OO", first, second));
  }

  // `Held`, of a tensor that was there before the step.
  Owned held_of(const at::Tensor& tensor, PyObject* wrapped) const {
    int64_t at = address_of(tensor);
    if (at == 0 || PyDict_GET_SIZE(classes->sources.get()) != 0 || PyDict_GET_SIZE(exposed_.get()) != 0 ||
        !tensor.storage().resizable()) {
      return Owned();
    }
    Owned held = instance(classes->held), storage = storage_of(tensor), address = number(at);
    Owned version = number(tensor._version()), identity = identity_of(tensor);
    classes->held_tensor.set(held.get(), alias_of(tensor, wrapped));
    classes->held_storage.set(held.get(), std::move(storage));
    classes->held_state.set(held.get(), Owned(PyTuple_Pack(2, version.get(), identity.get())));
    classes->held_cell.set(held.get(), Py_None);
    classes->held_view.set(held.get(), Py_None);
    Owned mark = weak(held.get());
    if (PyObject* others = found_in(held_, address.get())) {
      check(PyList_Append(others, mark.get()) == 0);
    } else {
      Owned marks(PyList_New(1));
      PyList_SET_ITEM(marks.get(), 0, mark.release());
      put_in(held_.get(), address.get(), marks);
    }
    return held;
  }

  // The cells of what an op made.
  void name_results(
      Op& known,
      c10::ArrayRef<IValue> results,
      std::vector<c10::StorageImpl*>& storages,
      PyObject* recipe) const {
    std::vector<at::Tensor> made;
    for (const IValue& result : results) {
      if (result.isTensor() && result.toTensor().defined()) {
        made.push_back(result.toTensor());
      } else if (result.isTensorList()) {
        for (const at::Tensor& tensor : result.toTensorVector()) {
          made.push_back(tensor);
        }
      }
    }
    if (made.size() != known.writes.size()) {  // views of arguments are among the results
      std::vector<at::Tensor> fresh;
      for (const at::Tensor& tensor : made) {
        auto* storage = tensor.layout() == at::kStrided ? tensor.storage().unsafeGetStorageImpl() : nullptr;
        if (storage != nullptr && std::find(storages.begin(), storages.end(), storage) == storages.end()) {
          storages.push_back(storage);
          fresh.push_back(tensor);
        }
      }
      made = std::move(fresh);
    }
    if (made.size() != known.writes.size()) {
      ask("made_other_values", known.number.get(), number(int64_t(made.size())).get());
      return;
    }
    Owned marks(PyList_New(made.size()));
    for (size_t at = 0; at < made.size(); ++at) {
      PyList_SET_ITEM(marks.get(), at, named(known.writes[at], made[at], recipe).release());
    }
    classes->recipe_made.set(recipe, std::move(marks));
    put_in(recipes_.get(), known.number.get(), weak(recipe));
    if (known.is_fused && !made.empty()) {
      ask("fuse", recipe, Owned(THPVariable_Wrap(made[0])).get());
    }
  }

  // A weak reference to the cell of a value that an op just made.
  Owned named(const Write& write, const at::Tensor& tensor, PyObject* recipe) const {
    if (!write.needs_cell) {
      return Owned::shared(classes->nobody.get());
    }
    Owned storage = storage_of(tensor);
    if (!can_be_marked(tensor, storage)) {
      Owned wrapped(THPVariable_Wrap(tensor)), captures = referent(captures_.get());
      return Owned(PyObject_CallMethod(
          captures.get(), "add_output", "OOO", write.value.get(), wrapped.get(), recipe));
    }
    Owned cell = cell_for(write.value.get(), tensor, recipe);
    mark(tensor, storage, cell);
    Owned found = weak(cell.get());
    put_in(cells_.get(), write.value.get(), found);
    return found;
  }

  // -- marks ------------------------------------------------------------------------------------------------------------

  // Whether nothing is known of a storage yet.
  static bool can_be_marked(const at::Tensor& tensor, const Owned& storage) {
    return address_of(tensor) != 0 && PyDict_GetItemWithError(dict_of(storage), classes->mark) == nullptr;
  }

  // `Marks.set`, where no other cell was on the storage. `mark`: a cell, or a weak reference to it.
  void mark(const at::Tensor& tensor, const Owned& storage, const Owned& mark) const {
    put_in(dict_of(storage), classes->mark, mark);
    put_in(marked_.get(), number(address_of(tensor)).get(), weak(storage.get()));
  }

  // -- saved tensors ----------------------------------------------------------------------------------------------------

  static bool is_as(const Pack& planned, const at::Tensor& tensor) {
    if (tensor.scalar_type() == at::kUInt16) {
      return false;  // it may be a token, which stands for something else (`outcore.memory.tensors`)
    }
    if (reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())) != planned.dtype.get()) {
      return false;
    }
    PyObject* shape = planned.shape.get();
    if (shape == Py_None) {
      return true;
    }
    auto sizes = tensor.sizes();
    if (PyTuple_GET_SIZE(shape) != Py_ssize_t(sizes.size())) {
      return false;
    }
    for (size_t at = 0; at < sizes.size(); ++at) {
      if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, at)) != sizes[at]) {
        return false;
      }
    }
    return true;
  }

  // `Kept`, of a tensor that simply stays.
  static Owned kept(const Pack& planned, const at::Tensor& tensor, PyObject* wrapped, PyObject* run) {
    if (PyDict_GET_SIZE(classes->sources.get()) != 0) {
      return Owned();  // it may be one that does not stay
    }
    Owned kept = instance(classes->kept);
    classes->kept_source.set(kept.get(), weak(wrapped));
    classes->kept_tensor.set(kept.get(), alias_of(tensor, wrapped));
    classes->kept_version.set(kept.get(), number(tensor._version()));
    classes->kept_pack.set(kept.get(), planned.number.get());
    classes->kept_run.set(kept.get(), run);
    return kept;
  }

  // `Handle`, of a value that is put away, or read again.
  Owned handle_of(Pack& planned, const at::Tensor& tensor, PyObject* wrapped, PyObject* run) const {
    Owned storage = storage_of(tensor), cell = cell_of_value(planned.value.get());
    if (address_of(tensor) == 0 || (cell ? !is_on(tensor, storage, cell.get()) : !can_be_marked(tensor, storage))) {
      return Owned();
    }
    bool is_away = !cell || (classes->cell_parcel.is_none(cell.get()) && classes->cell_data.is_none(cell.get()));
    bool has_recipe = cell && !classes->cell_recipe.is_none(cell.get());
    bool is_held = is_away && !(planned.is_made_again && has_recipe);
    if (is_held && planned.is_made_again) {
      return Owned();  // it is not where its recipe was to be
    }
    if (!cell) {
      cell = cell_for(planned.value.get(), tensor, Py_None);
      put_in(cells_.get(), planned.value.get(), weak(cell.get()));
    }
    if (is_held) {
      Owned version = number(tensor._version()), identity = identity_of(tensor);
      classes->cell_data.set(cell.get(), alias_of(tensor, wrapped));
      classes->cell_held.set(cell.get(), Owned(PyTuple_Pack(2, version.get(), identity.get())));
      mark(tensor, storage, weak(cell.get()));
      classes->cell_recipe.set(cell.get(), Py_None);
    }
    if (planned.is_packed_again) {
      put_in(packed_again_.get(), planned.value.get(), cell);
    } else if (found_in(packed_again_, planned.value.get()) != nullptr) {
      check(PyDict_DelItem(packed_again_.get(), planned.value.get()) == 0);
    }
    Owned handle = view_of(classes->handle, tensor, wrapped, planned.lies);
    classes->handle_source.set(handle.get(), weak(wrapped));
    classes->cell_is_saved.set(cell.get(), Py_True);
    classes->handle_cell.set(handle.get(), std::move(cell));
    classes->handle_home.set(handle.get(), Py_None);
    classes->handle_pack.set(handle.get(), planned.number.get());
    classes->handle_run.set(handle.get(), run);
    return handle;
  }
};

// -- what PyTorch calls -------------------------------------------------------------------------------------------------

void run_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (auto step = active.lock()) {
    c10::impl::ExcludeDispatchKeyGuard guard(kWatched);
    if (step->run(op, keys, stack)) {
      return;
    }
  }
  op.callBoxedForDispatchKey(kInPython, *stack);
}

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// From now on an operator's calls come here first. Its kernel in Python is registered for `kInPython` by then.
void take_over(const std::string& name) {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  Silence silence;  // PyTorch warns when a kernel replaces another: ours replaces ours
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto handle = find_operator(name);
  TORCH_CHECK(handle, "no operator ", name);
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(
      handle->operator_name(),
      kOps,
      c10::KernelFunction::makeFromBoxedFunction<&run_op>(),
      std::nullopt,
      nullptr,
      "outcore"));
}

// `pack(tensor)`, of saved-tensor hooks; `in_python`: what is called for all that is not ordinary.
PyObject* pack(PyObject* in_python, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (auto step = active.lock(); step && classes != nullptr) {
    if (Owned handle = step->pack(tensor)) {
      return handle.release();
    }
  }
  return PyObject_CallOneArg(in_python, tensor);
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_definition = {"pack", pack, METH_O, nullptr};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("know", [](const py::dict& found) { classes = new Classes(found); });
  module.def("take_over", &take_over);
  module.def("table", &make_table);
  module.def("packer", [](const py::object& in_python) {
    return py::reinterpret_steal<py::object>(PyCFunction_New(&pack_definition, in_python.ptr()));
  });
  py::class_<Table, std::shared_ptr<Table>>(module, "Table");
  py::class_<Position, std::shared_ptr<Position>>(module, "Position")
      .def_property(
          "num_ops",
          [](const Position& position) { return position.num_ops.load(); },
          [](Position& position, int64_t num_ops) { position.num_ops = num_ops; })
      .def_readwrite("looks_away", &Position::looks_away)
      .def("stop", &Position::stop);
  // A position in a program, which this thread's ops and saved tensors follow from now on.
  module.def("follow", [](std::shared_ptr<Table> table, const py::dict& step) {
    auto position = std::make_shared<Position>(std::move(table), step);
    active = position;
    return position;
  });
}
