// The fused operators and linear layers, with their messages, as nodes of autograd's graph, called from Python without
// torch's dispatcher.
//
// The Python code of torch.library and torch.autograd.Function for an operator, forward and backward, takes the host
// several times as long as launching its kernel. Here a function checks that its arguments are usual ones, launches the
// kernel in the library that megatron/kernels/library.py has loaded, and adds a node. For other arguments it returns
// NotImplemented; Python then uses the general implementation, which computes the same numbers and raises an error with
// a reason if they do not fit.
//
// The extension is compiled against one version of torch and one of Python.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Below = at::AutoDispatchBelowADInplaceOrView;

// Nodes are held by std::shared_ptr or, in newer versions of torch, by c10::intrusive_ptr. These functions are
// templates, so that only the code for this version is instantiated.
constexpr bool SHARED = std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>;
template <class N> using Pointer = std::conditional_t<SHARED, std::shared_ptr<N>, c10::intrusive_ptr<N>>;
template <class N> Pointer<N> make_node() {
    if constexpr (SHARED) return Pointer<N>(new N(), [](auto *node) { deleteNode(node); });
    else return c10::make_intrusive<N>();
}
template <class N> Pointer<N> pointer_to(N &node) {
    if constexpr (SHARED) return node.shared_from_this();
    else return Pointer<N>::unsafe_reclaim_from_nonowning(&node);
}

// ---- Python ---------------------------------------------------------------------------------------------------------

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

struct NoGil {
    PyThreadState *state = PyEval_SaveThread();
    ~NoGil() { PyEval_RestoreThread(state); }
};

// A reference that may be dropped by any thread.
struct Reference {
    PyObject *object = nullptr;
    Reference() = default;
    explicit Reference(PyObject *taken) : object(taken) {}
    Reference(Reference &&other) noexcept : object(other.object) { other.object = nullptr; }
    Reference &operator=(Reference &&other) noexcept {
        std::swap(object, other.object);
        return *this;
    }
    ~Reference() {
        if (!object || !Py_IsInitialized()) return;
        Gil gil;
        Py_DECREF(object);
    }
    explicit operator bool() const { return object != nullptr; }
};

Reference checked(PyObject *result) {
    if (!result) throw python_error();
    return Reference(result);
}

PyObject *kernel_error, *current_stream;  // see set_up
PyObject *GRADIENT_SINK, *DIRECT, *IN_FP32, *FRESH, *TOTAL, *PRIVATE_TOTAL, *BEFORE_USE, *ADDED, *ADD, *ADD_PRODUCT, *DEFERRING, *WIDENS, *ENTER, *LEAVE;
PyObject *ALL_REDUCE, *ALL_GATHER, *REDUCE_SCATTER, *SEQUENCE;

Reference attribute(PyObject *object, PyObject *name) { return checked(PyObject_GetAttr(object, name)); }

bool is_true(PyObject *object, PyObject *name) { return attribute(object, name).object == Py_True; }

// ---- kernels --------------------------------------------------------------------------------------------------------

using Place = std::array<uint64_t, 4>;  // start, period, outer, inner

struct Kernels {
    const char *(*error)(int) = nullptr;
    int (*norm)(int, void *, void *, float *, const void *, const void *, const void *, const void *, const void *,
                int64_t, int64_t, float, float, int, void *);
    int (*norm_backward)(int, void *, float *, float *, float *, float *, const void *, const void *, const void *,
                         const void *, const float *, int64_t, int64_t, int64_t, float, int, int, void *);
    int (*activation)(int, int, void *, const void *, const void *, int64_t, int64_t, void *);
    int (*activation_backward)(int, int, void *, void *, void *, const void *, const void *, const void *, int64_t,
                               int64_t, int64_t, int, void *);
    int (*dropout)(int, void *, const void *, const void *, const void *, int64_t, int64_t, uint64_t, uint32_t, float,
                   int, uint64_t, uint32_t, uint64_t, uint64_t, const void *, uint64_t, void *);
    int (*dropout_backward)(int, void *, void *, void *, const void *, int64_t, int64_t, int64_t, int, uint64_t,
                            uint32_t, float, int, uint64_t, uint32_t, uint64_t, uint64_t, const void *, uint64_t,
                            void *);
    int (*rotary)(int, void *, const void *, const void *, const void *, int64_t, int64_t, int64_t, int64_t, int64_t,
                  int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, float, void *);
};
Kernels on_cpu, on_gpu;

const Kernels &kernels_of(const Tensor &x) { return x.is_cpu() ? on_cpu : on_gpu; }

int type_of(const Tensor &x) {
    switch (x.scalar_type()) {
    case at::kFloat: return 0;
    case at::kHalf: return 1;
    case at::kBFloat16: return 2;
    default: return -1;
    }
}

void *stream_of(const Tensor &x) {
    if (x.is_cpu()) return nullptr;
    Gil gil;
    const Reference index(PyLong_FromLong(x.get_device()));
    const Reference found = checked(PyObject_CallOneArg(current_stream, index.object));
    return PyLong_AsVoidPtr(found.object);
}

void done(const char *name, const Tensor &x, int code) {
    if (!code) return;
    Gil gil;
    PyErr_Format(kernel_error, "%s: %s (code %d)", name, kernels_of(x).error(code), code);
    throw python_error();
}

template <class T = void> T *data(const Tensor &x) { return x.defined() ? static_cast<T *>(x.data_ptr()) : nullptr; }

// Returns whether y is contiguous and has the type and the device of x.
bool beside(const Tensor &x, const Tensor &y) {
    return y.scalar_type() == x.scalar_type() && y.device() == x.device() && y.is_contiguous();
}
bool vector_beside(const Tensor &x, const Tensor &v) {
    return !v.defined() || (v.dim() == 1 && v.size(0) == x.size(-1) && beside(x, v));
}
bool usual(const Tensor &x) {
    return type_of(x) >= 0 && (x.is_cpu() || x.is_cuda()) && x.dim() > 0 && x.numel() > 0 && x.is_contiguous() &&
           kernels_of(x).error;
}

Tensor floats(const Tensor &like, at::IntArrayRef sizes) { return at::empty(sizes, like.options().dtype(at::kFloat)); }

// ---- gradients of parameters ----------------------------------------------------------------------------------------

// Where a kernel writes the fp32 gradient of a parameter, like gradient_output and gradient_written in
// megatron/parallel/gradient_accumulator.py.
struct Output {
    Tensor out;
    bool adds = false;
    Reference accumulator;

    Output() = default;
    explicit Output(const Tensor &parameter) {
        Gil gil;
        accumulator = find(parameter);
        if (accumulator && is_true(accumulator.object, IN_FP32)) {
            // The property `total` waits until the memory is available; usually it is.
            const bool waits = attribute(accumulator.object, BEFORE_USE).object != Py_None;
            out = THPVariable_Unpack(attribute(accumulator.object, waits ? TOTAL : PRIVATE_TOTAL).object);
            adds = !is_true(accumulator.object, FRESH);
        } else {
            const bool wide = parameter.scalar_type() == at::kDouble;
            out = at::empty(parameter.sizes(), parameter.options().dtype(wide ? at::kDouble : at::kFloat));
        }
    }

    // Returns the accumulator to which a layer adds the parameter's gradient; empty if it leaves the gradient to
    // autograd.
    static Reference find(const Tensor &parameter) {
        const Reference object(THPVariable_Wrap(parameter));
        Reference accumulator(PyObject_GetAttr(object.object, GRADIENT_SINK));
        if (!accumulator) {
            PyErr_Clear();
            return accumulator;
        }
        if (!parameter.requires_grad() || !is_true(accumulator.object, DIRECT)) return Reference();
        return accumulator;
    }

    // Completes the gradient after the kernel; returns what is left to autograd: the gradient, or nothing.
    Tensor written() {
        if (!accumulator) return out;
        Gil gil;
        if (!is_true(accumulator.object, IN_FP32)) {
            const Reference gradient(THPVariable_Wrap(out));
            checked(PyObject_CallMethodOneArg(accumulator.object, ADD, gradient.object));
            return Tensor();
        }
        complete();
        return Tensor();
    }

    // Adds dy^T x to the weight's accumulator; returns what is left to autograd: the gradient, or nothing.
    static Tensor add_product(const Tensor &weight, const Tensor &dy, const Tensor &x) {
        Output of;
        {
            Gil gil;
            of.accumulator = find(weight);
            if (of.accumulator) {
                const bool ready = attribute(of.accumulator.object, BEFORE_USE).object == Py_None;
                if (ready) of.out = THPVariable_Unpack(attribute(of.accumulator.object, PRIVATE_TOTAL).object);
                if (!ready || !(of.out.scalar_type() == dy.scalar_type() || is_true(of.accumulator.object, WIDENS))) {
                    const Reference a(THPVariable_Wrap(dy)), b(THPVariable_Wrap(x));
                    checked(PyObject_CallMethodObjArgs(of.accumulator.object, ADD_PRODUCT, a.object, b.object, nullptr));
                    return Tensor();
                }
                of.adds = !is_true(of.accumulator.object, FRESH);
            }
        }
        if (!of.accumulator) return at::mm(dy.t(), x).view(weight.sizes());
        const Tensor sum = of.out.view({dy.size(-1), x.size(-1)});
        of.sum_product(sum, dy.t(), x);
        Gil gil;
        of.complete();
        return Tensor();
    }

    template <class T> void sum_product(T sum, const T &a, const T &b) const {
        const Below below;
        const double keep = adds;
        if (sum.scalar_type() == a.scalar_type()) at::addmm_out(sum, sum, a, b, keep);
        else if constexpr (requires { at::addmm_out(sum, sum, a, b, at::kFloat, keep); })
            at::addmm_out(sum, sum, a, b, at::kFloat, keep);
    }

    void complete() const {
        if (PyObject_SetAttr(accumulator.object, FRESH, Py_False)) throw python_error();
        const Reference added = attribute(accumulator.object, ADDED);
        if (added.object == Py_None) return;
        const Reference parameter = checked(PyObject_GetAttrString(accumulator.object, "parameter"));
        checked(PyObject_CallOneArg(added.object, parameter.object));
    }
};

// Writes the sums of a gradient over its rows as the bias's gradient: by a kernel, or by torch if parts is 0.
void column_sums(const Tensor &gradient, Output &bias, int64_t parts) {
    const int type = type_of(gradient);
    const Tensor dense = gradient.contiguous();
    if (!parts || type < 0 || !kernels_of(dense).error) {
        const Tensor sum = at::sum(dense.reshape({-1, dense.size(-1)}), {0}, false, bias.out.scalar_type());
        if (bias.adds) bias.out.add_(sum);
        else bias.out.copy_(sum);
        return;
    }
    const int64_t n = dense.size(-1);
    const Tensor partial = floats(dense, {parts, n});
    done("mk_bias_dropout_add_backward", dense,
         kernels_of(dense).dropout_backward(type, nullptr, bias.out.data_ptr(), partial.data_ptr(), dense.data_ptr(),
                                            dense.numel() / n, n, parts, bias.adds, 0, 0, 1.0f, 0, 0, 1, 1, 0,
                                            nullptr, 0, stream_of(dense)));
}

// ---- messages -------------------------------------------------------------------------------------------------------

// A tensor-parallel group, and how the linear layers of a LayerContext use it.
struct Region {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    int64_t size;
    bool in_sequence, overlaps;
    Reference flight, kind, defer;

    // The caller holds the interpreter's lock. The threads that the group's destructor joins need it to free tensors.
    ~Region() {
        const NoGil no_gil;
        group.reset();
    }
};

// A collective under way. The group's flight recorder gets an entry for it, and one for the wait.
struct Message {
    const Region *region = nullptr;
    PyObject *call = nullptr;
    int64_t bytes = 0;
    bool by_host = false;
    Reference number;
    c10::intrusive_ptr<c10d::Work> work;

    Message() = default;
    template <class F> Message(const Region &of, PyObject *name, const Tensor &x, F start)
        : region(&of), call(name), bytes(x.nbytes()), by_host(x.is_cpu()) {
        number = enter();
        const Below below;  // autograd's fallback for c10d takes longer than the call
        work = start(*region->group);
        leave();
    }
    void wait() {
        if (!work) return;
        enter();
        work->wait();
        leave();
        work.reset();
    }

  private:
    Reference enter() const {
        Gil gil;
        const Reference size(PyLong_FromLongLong(bytes));
        PyObject *const args[] = {region->flight.object, call, region->kind.object, size.object, by_host ? Py_True : Py_False, number.object};
        return checked(PyObject_VectorcallMethod(ENTER, args, 5, number ? SEQUENCE : nullptr));
    }
    void leave() const {
        Gil gil;
        checked(PyObject_CallMethodNoArgs(region->flight.object, LEAVE));
    }
};

// torch 2.13 renamed two calls.
template <class G> auto all_gather(G &group, Tensor &to, Tensor &from) {
    if constexpr (requires { group.all_gather_single(to, from); }) return group.all_gather_single(to, from);
    else return group._allgather_base(to, from);
}
template <class G> auto reduce_scatter_into(G &group, Tensor &to, Tensor &from) {
    if constexpr (requires { group.reduce_scatter_single(to, from); }) return group.reduce_scatter_single(to, from);
    else return group._reduce_scatter_base(to, from);
}

// Starts to gather x [s/tp, ..] from all ranks; returns [s, ..], which is valid once the message has arrived.
Tensor gather(const Region &region, const Tensor &x, Message &message) {
    Tensor from = x.contiguous();
    at::DimVector sizes(x.sizes());
    sizes[0] *= region.size;
    Tensor whole = at::empty(sizes, x.options());
    message = Message(region, ALL_GATHER, whole, [&](auto &group) { return all_gather(group, whole, from); });
    return whole;
}

Message all_reduce(const Region &region, const Tensor &x) {
    std::vector<Tensor> tensors{x};
    return Message(region, ALL_REDUCE, x, [&](auto &group) { return group.allreduce(tensors); });
}
Message reduce_scatter(const Region &region, Tensor part, Tensor x) {
    return Message(region, REDUCE_SCATTER, x, [&](auto &group) { return reduce_scatter_into(group, part, x); });
}

// ---- products with messages: gathered_product and summed_product in megatron/layers/linear.py ------------------------

Tensor flat(const Tensor &x) { return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)}); }

Tensor product(const Tensor &x, const Tensor &matrix, const Tensor &bias) {
    const Below below;
    at::DimVector sizes(x.sizes());
    sizes.back() = matrix.size(1);
    return (bias.defined() ? at::addmm(bias, flat(x), matrix) : at::mm(flat(x), matrix)).view(sizes);
}

// Gathers and multiplies x in n chunks. Unless `whole` is null, it gets the x of all ranks.
Tensor gathered_product(const Region &region, const Tensor &x, const Tensor &matrix, const Tensor &bias, int64_t n,
                        Tensor *whole = nullptr) {
    const Below below;
    Message arriving;
    if (n == 1) {
        const Tensor all = gather(region, x, arriving);
        arriving.wait();
        if (whole) *whole = all;
        return product(all, matrix, bias);
    }
    const int64_t rows = x.size(0);
    at::DimVector sizes(x.sizes());
    sizes.insert(sizes.begin(), region.size);
    const Tensor inputs = whole ? at::empty(sizes, x.options()) : Tensor();
    sizes.back() = matrix.size(1);
    const Tensor y = at::empty(sizes, x.options());
    const auto sent = [&](int64_t i) { return x.slice(0, rows * i / n, rows * (i + 1) / n); };
    Tensor following = gather(region, sent(0), arriving);
    for (int64_t i = 0; i < n; ++i) {
        const Tensor part = following;
        Message message = std::move(arriving);
        if (i + 1 < n) following = gather(region, sent(i + 1), arriving);
        message.wait();
        const auto put = [&](const Tensor &to, const Tensor &from) {
            const Tensor rows_of_all = to.slice(1, rows * i / n, rows * (i + 1) / n);
            rows_of_all.copy_(from.view(rows_of_all.sizes()));
        };
        put(y, product(part, matrix, bias));
        if (whole) put(inputs, part);
    }
    if (whole) *whole = inputs.flatten(0, 1);
    return y.flatten(0, 1);
}

using Messages = std::vector<Message>;
void wait(Messages &messages) {
    for (Message &message : messages) message.wait();
}

// Multiplies x in n chunks, and starts to sum the products over the ranks; the result is valid once all `messages` have
// arrived.
Tensor summed_product(const Region &region, const Tensor &x, const Tensor &matrix, int64_t n, Messages &messages) {
    const bool scatters = region.in_sequence;
    const int64_t parts = scatters ? region.size : 1, rows = x.size(0) / parts, out = matrix.size(1);
    at::DimVector sizes(x.sizes());
    sizes[0] = rows, sizes.back() = out;
    const Below below;
    if (n == 1) {
        const Tensor term = product(x, matrix, Tensor()), y = scatters ? at::empty(sizes, x.options()) : term;
        messages.push_back(scatters ? reduce_scatter(region, y, term) : all_reduce(region, y));
        return y;
    }
    const Tensor y = at::empty(sizes, x.options()), cut = x.unflatten(0, {parts, rows});
    for (int64_t i = 0; i < n; ++i) {
        const int64_t first = rows * i / n, end = rows * (i + 1) / n;
        Tensor part = y.slice(0, first, end).view({-1, out});
        const Tensor of_all = flat(cut.slice(1, first, end));
        if (scatters) {
            messages.push_back(reduce_scatter(region, part, at::mm(of_all, matrix)));
        } else {
            at::mm_out(part, of_all, matrix);
            messages.push_back(all_reduce(region, part));
        }
    }
    return y;
}

// ---- nodes ----------------------------------------------------------------------------------------------------------

struct FusedNode : torch::autograd::Node {
    std::vector<SavedVariable> saved;
    // Parameters on which the gradients depend, with their versions. They are not saved, because hooks on saved tensors
    // may copy them, and a copy has no accumulator.
    std::vector<std::pair<Tensor, uint32_t>> used;

    void uses(const Tensor &parameter) {
        if (parameter.defined()) used.emplace_back(parameter, parameter._version());
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable &each : saved) each.reset_data();
    }
    Tensor take(size_t i) { return saved[i].unpack(pointer_to<torch::autograd::Node>(*this)); }
    variable_list apply(variable_list &&gradients) override {
        if (at::GradMode::is_enabled()) {
            Gil gil;
            PyErr_Format(kernel_error, "%s has no second derivative; use torch's own operators where one is needed",
                         name().c_str());
            throw python_error();
        }
        for (const auto &[parameter, version] : used)
            TORCH_CHECK(static_cast<uint32_t>(parameter._version()) == version, name(), " was called with a parameter ",
                        parameter.sizes(), " that has been modified by an inplace operation since: it is at version ",
                        parameter._version(), ", expected ", version);
        const c10::OptionalDeviceGuard guard(device);
        return differentiate(std::move(gradients));
    }
    virtual variable_list differentiate(variable_list &&gradients) = 0;
    std::optional<at::Device> device;
};

// Makes a node of type N if one of the inputs, which are in the order of its gradients, requires a gradient.
template <class N, class... T> Pointer<N> record(const Tensor &x, const T &...inputs) {
    if (!torch::autograd::compute_requires_grad(x, inputs...)) return {};
    Pointer<N> node = make_node<N>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, inputs...));
    if (!x.is_cpu()) node->device = x.device();
    return node;
}

Tensor dense(const Tensor &x) { return x.defined() ? x.contiguous() : x; }

struct NormNode : FusedNode {
    bool added, rms;
    float plus;
    int64_t parts;
    Tensor weight, bias, shift;  // not as saved tensors, which may be copies, without accumulators

    std::string name() const override { return "megatron::norm"; }
    variable_list differentiate(variable_list &&gradients) override {
        const Tensor dy = dense(gradients[0]), dsum = added ? dense(gradients[1]) : Tensor();
        Output of_weight, of_bias, of_shift;
        Tensor dx = dsum;
        if (shift.defined() && should_compute_output(3) && (dy.defined() || dsum.defined())) of_shift = Output(shift);
        if (dy.defined()) {
            const Tensor x = take(0), statistics = take(1);
            const int64_t n = x.size(-1), rows = x.numel() / n;
            of_weight = Output(weight);
            if (bias.defined()) of_bias = Output(bias);
            dx = at::empty_like(x);
            const int sums = (rms ? 1 : 2) + of_shift.out.defined();
            const Tensor partial = floats(x, {parts, sums, n});
            const Tensor unused = rms || bias.defined() ? Tensor() : floats(x, {n});
            const Tensor &dbias = bias.defined() ? of_bias.out : unused;
            done("mk_norm_backward", x,
                 kernels_of(x).norm_backward(type_of(x), dx.data_ptr(), data<float>(of_weight.out), data<float>(dbias),
                                             data<float>(of_shift.out), data<float>(partial), data(dy), data(dsum),
                                             x.data_ptr(), weight.data_ptr(), data<float>(statistics), rows, n, parts,
                                             plus, rms, of_weight.adds | of_bias.adds << 1 | of_shift.adds << 2,
                                             stream_of(x)));
        } else if (of_shift.out.defined()) {
            column_sums(dsum, of_shift, parts);
        }
        variable_list results{dx, Tensor(), Tensor()};
        if (of_weight.out.defined()) results[1] = of_weight.written();
        if (of_bias.out.defined()) results[2] = of_bias.written();
        if (added) {
            results.push_back(of_shift.out.defined() ? of_shift.written() : Tensor());
            results.push_back(dx);
        }
        return results;
    }
};

struct ActivationNode : FusedNode {
    int kind, inputs;
    int64_t parts;
    Tensor bias;

    std::string name() const override { return "megatron::bias_activation"; }
    variable_list differentiate(variable_list &&gradients) override {
        if (!gradients[0].defined()) return {Tensor(), Tensor()};
        const Tensor dy = gradients[0].contiguous(), x = take(0), dx = at::empty_like(x);
        const int64_t n = dy.size(-1);
        Output of_bias;
        Tensor partial;
        if (bias.defined()) {
            of_bias = Output(bias);
            partial = floats(x, {parts, inputs, n});
        }
        done("mk_bias_activation_backward", x,
             kernels_of(x).activation_backward(type_of(x), kind, dx.data_ptr(), data(of_bias.out), data(partial),
                                               dy.data_ptr(), x.data_ptr(), data(bias), dy.numel() / n, n, parts,
                                               of_bias.adds, stream_of(x)));
        return {dx, bias.defined() ? of_bias.written() : Tensor()};
    }
};

struct Mask {
    uint64_t seed;
    uint32_t keep;
    float scale;
    bool random;
    Place place;
};

struct DropoutNode : FusedNode {
    bool added;
    int64_t parts;
    Mask mask;
    Tensor bias;

    std::string name() const override { return "megatron::bias_dropout_add"; }
    variable_list differentiate(variable_list &&gradients) override {
        const Tensor &dy = gradients[0];
        if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
        Tensor dx = dy;
        Output of_bias;
        if (bias.defined()) of_bias = Output(bias);
        if (mask.random) {
            const Tensor given = dy.contiguous();
            const int64_t n = given.size(-1);
            const Tensor partial = bias.defined() ? floats(given, {parts, n}) : Tensor();
            dx = at::empty_like(given);
            done("mk_bias_dropout_add_backward", given,
                 kernels_of(given).dropout_backward(
                     type_of(given), dx.data_ptr(), data(of_bias.out), data(partial), given.data_ptr(),
                     given.numel() / n, n, parts, of_bias.adds, mask.seed, mask.keep, mask.scale, 1, mask.place[0],
                     (uint32_t)mask.place[1], mask.place[2], mask.place[3], nullptr, 0, stream_of(given)));
        } else if (bias.defined()) {
            column_sums(dy, of_bias, parts);
        }
        return {dx, bias.defined() ? of_bias.written() : Tensor(), added ? dy : Tensor()};
    }
};

// Splits the projection [s, b, groups, queries + 2, d] into queries, keys and values: as views, or with rotated queries
// and keys.
struct HeadsNode : FusedNode {
    at::DimVector shape;
    bool turns;

    std::string name() const override { return "megatron::split_heads"; }
    variable_list differentiate(variable_list &&gradients) override;
};

void turn(const Tensor &to, const Tensor &from, const Tensor &cos, const Tensor &sin, float sign) {
    // from and to [s, b, groups, queries, d]: samples and groups together have one stride
    const int64_t s = from.size(0), b = from.size(1), groups = from.size(2), heads = from.size(3), d = from.size(4);
    const bool shared = cos.size(1) == 1;
    TORCH_INTERNAL_ASSERT(shared || b == cos.size(1));
    // The kernel's rows [position][sample][head] are [s][b * groups][queries] here, or [s * b][groups][queries] if each
    // sample has its own angles.
    const int64_t positions = shared ? s : s * b, samples = shared ? b * groups : groups;
    const int64_t by_position = shared ? from.stride(0) : from.stride(1), to_position = shared ? to.stride(0) : to.stride(1);
    done("mk_rotary", from,
         kernels_of(from).rotary(type_of(from), to.data_ptr(), from.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                                 positions, samples, heads, d, cos.size(-1), by_position, from.stride(2),
                                 from.stride(3), to_position, to.stride(2), to.stride(3), 1, sign,
                                 stream_of(from)));
}

variable_list HeadsNode::differentiate(variable_list &&gradients) {
    const Tensor some = gradients[0].defined() ? gradients[0] : gradients[1].defined() ? gradients[1] : gradients[2];
    if (!some.defined()) return {Tensor()};
    const Tensor mixed = at::empty(shape, some.options());
    const int64_t s = shape[0], b = shape[1], groups = shape[2], queries = shape[3] - 2, d = shape[4];
    const Tensor dq = mixed.narrow(3, 0, queries), dk = mixed.narrow(3, queries, 1), dv = mixed.narrow(3, queries + 1, 1);
    if (!turns && gradients[0].defined() && gradients[1].defined() && gradients[2].defined()) {
        return {at::cat({gradients[0].reshape({s, b, groups, queries, d}), gradients[1].unsqueeze(3),
                         gradients[2].unsqueeze(3)},
                        3)
                    .flatten(2)};
    }
    const Tensor cos = turns ? take(0) : Tensor(), sin = turns ? take(1) : Tensor();
    for (int i = 0; i < 3; ++i) {
        const Tensor to = i == 0 ? dq : i == 1 ? dk : dv;
        if (!gradients[i].defined()) {
            to.zero_();
            continue;
        }
        const Tensor from = gradients[i].reshape({s, b, groups, to.size(3), d});
        if (!turns || i == 2) {
            to.copy_(from);
            continue;
        }
        turn(to, from.contiguous(), cos, sin, -1.0f);
    }
    return {mixed.flatten(2)};
}

struct LinearNode : FusedNode {
    Tensor weight, bias;  // not as saved tensors, see NormNode
    Reference queue;      // of deferred weight gradients
    Reference capsule;    // owns the region
    const Region *region = nullptr;
    bool column, partial;
    int64_t chunks, parts;

    // Tells engine/gradients.py whether gradients of x are terms of a sum over the ranks.
    std::string name() const override {
        if (!region) return "megatron::linear";
        return partial ? "megatron::linear_with_partial_gradient" : "megatron::linear_with_whole_gradient";
    }
    // x is gathered during the product for dx, and dx is summed during the product for dW.
    variable_list differentiate(variable_list &&gradients) override {
        if (!gradients[0].defined()) return {Tensor(), Tensor(), Tensor()};
        const bool of_x = should_compute_output(0), of_weight = should_compute_output(1);
        const bool cut = region && region->in_sequence, later = of_weight && defers();
        Tensor x = take(0), dy = gradients[0];
        const Tensor matrix = weight.view({-1, weight.size(-1)});
        Message of_input;
        Messages of_sum;
        variable_list results(3);
        if (cut && column && of_weight && !later) x = gather(*region, x, of_input);
        if (cut && !column && of_weight && !of_x) dy = gather(*region, dy, of_input);
        if (of_x && region && column) results[0] = summed_product(*region, dy, matrix, chunks, of_sum);
        else if (of_x && cut) results[0] = gathered_product(*region, dy, matrix, Tensor(), chunks, of_weight ? &dy : nullptr);
        else if (of_x) results[0] = product(dy, matrix, Tensor());
        if (region && !region->overlaps) wait(of_sum);
        of_input.wait();
        if (later) defer(dy, x, cut && column);
        else if (of_weight) results[1] = Output::add_product(weight, flat(dy), flat(x));
        if (bias.defined() && should_compute_output(2)) {
            Output of_bias(bias);
            column_sums(gradients[0], of_bias, parts);
            results[2] = of_bias.written();
        }
        wait(of_sum);
        return results;
    }
    bool defers() const {
        Gil gil;
        return is_true(queue.object, DEFERRING);
    }
    void defer(const Tensor &dy, const Tensor &x, bool gathers) const {
        Gil gil;
        const Reference p(THPVariable_Wrap(weight)), a(THPVariable_Wrap(dy)), b(THPVariable_Wrap(x));
        if (gathers) checked(PyObject_CallFunctionObjArgs(region->defer.object, p.object, a.object, b.object, nullptr));
        else checked(PyObject_CallMethodObjArgs(queue.object, ADD_PRODUCT, p.object, a.object, b.object, nullptr));
    }
};

// ---- calls from Python ----------------------------------------------------------------------------------------------

const Tensor &tensor(PyObject *object) {
    static const Tensor none;
    return object == Py_None ? none : THPVariable_Unpack(object);
}

PyObject *not_usual() { Py_RETURN_NOTIMPLEMENTED; }

// What watched() returned in the forward pass that is now being recomputed; -1 outside of recomputations.
thread_local int repeated = -1;

// Returns whether a tracer, profiler or transform has to see operators.
bool watched() {
    if (repeated >= 0) return repeated == 1;
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || at::impl::torch_function_mode_enabled() ||
           at::hasCallbacks() ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

// Returns whether nothing but the kernel has to see a call with these arguments, tensors or None: no tensor is of a
// subclass or has a forward-mode derivative, and watched() is false.
template <class... T> bool seen_by_none(T *...objects) {
    const auto plain = [](PyObject *object) {
        return object == Py_None ||
               (THPVariable_CheckTypeExact(Py_TYPE(object)) && !THPVariable_Unpack(object)._fw_grad(0).defined());
    };
    return (plain(objects) && ...) && !watched();
}

PyObject *wrap(const Tensor &x) { return THPVariable_Wrap(x); }

// x, shift, residual (None: neither residual nor shift), weight, bias, eps, one_plus, rms, parts -> y or (y, total)
PyObject *norm(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &x = tensor(args[0]), &shift = tensor(args[1]), &residual = tensor(args[2]), &weight = tensor(args[3]),
                 &bias = tensor(args[4]);
    const bool added = residual.defined(), rms = args[7] == Py_True;
    if (!seen_by_none(args[0], args[1], args[2], args[3], args[4]) || !usual(x) ||
        (added && (!beside(x, residual) || residual.sizes() != x.sizes())) || !vector_beside(x, shift) ||
        !vector_beside(x, weight) || !vector_beside(x, bias))
        return not_usual();
    const float eps = (float)PyFloat_AsDouble(args[5]), plus = args[6] == Py_True ? 1.0f : 0.0f;
    const int64_t n = x.size(-1), rows = x.numel() / n, parts = PyLong_AsLongLong(args[8]);
    Pointer<NormNode> node;
    Tensor y, total;
    void *const stream = stream_of(x);
    {
        NoGil no_gil;
        node = added ? record<NormNode>(x, weight, bias, shift, residual) : record<NormNode>(x, weight, bias);
        const Below below;
        const c10::OptionalDeviceGuard guard(x.is_cpu() ? std::nullopt : std::optional<at::Device>(x.device()));
        y = at::empty_like(x);
        if (added) total = at::empty_like(x);
        const Tensor statistics = floats(x, {rms ? 1 : 2, rows});
        done("mk_norm", x,
             kernels_of(x).norm(type_of(x), y.data_ptr(), data(total), data<float>(statistics), x.data_ptr(),
                                data(shift), data(residual), weight.data_ptr(), data(bias), rows, n, eps, plus, rms,
                                stream));
        if (node) {
            node->added = added, node->rms = rms, node->plus = plus, node->parts = parts;
            node->weight = weight, node->bias = bias, node->shift = shift;
            node->uses(weight);
            torch::autograd::set_history(y, node);
            if (added) torch::autograd::set_history(total, node);
            node->saved.emplace_back(added ? total : x, added);
            node->saved.emplace_back(statistics, false);
        }
    }
    if (!added) return wrap(y);
    return Py_BuildValue("(NN)", wrap(y), wrap(total));
    END_HANDLE_TH_ERRORS
}

// x, bias, kind, inputs, parts -> y
PyObject *bias_activation(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &x = tensor(args[0]), &bias = tensor(args[1]);
    const int kind = (int)PyLong_AsLong(args[2]), inputs = (int)PyLong_AsLong(args[3]);
    if (!seen_by_none(args[0], args[1]) || !usual(x) || x.size(-1) % inputs || !vector_beside(x, bias)) return not_usual();
    const int64_t n = x.size(-1) / inputs, rows = x.numel() / x.size(-1), parts = PyLong_AsLongLong(args[4]);
    Tensor y;
    void *const stream = stream_of(x);
    {
        NoGil no_gil;
        const Pointer<ActivationNode> node = record<ActivationNode>(x, bias);
        const Below below;
        const c10::OptionalDeviceGuard guard(x.is_cpu() ? std::nullopt : std::optional<at::Device>(x.device()));
        at::DimVector sizes(x.sizes());
        sizes.back() = n;
        y = at::empty(sizes, x.options());
        done("mk_bias_activation", x,
             kernels_of(x).activation(type_of(x), kind, y.data_ptr(), x.data_ptr(), data(bias), rows, n, stream));
        if (node) {
            node->kind = kind, node->inputs = inputs, node->parts = parts, node->bias = bias;
            node->uses(bias);
            node->saved.emplace_back(x, false);
            torch::autograd::set_history(y, node);
        }
    }
    return wrap(y);
    END_HANDLE_TH_ERRORS
}

// x, bias, residual, seed, keep, scale, random, start, period, outer, inner, parts -> y
PyObject *bias_dropout_add(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &x = tensor(args[0]), &bias = tensor(args[1]), &residual = tensor(args[2]);
    if (!seen_by_none(args[0], args[1], args[2]) || !usual(x) || !vector_beside(x, bias) ||
        (residual.defined() && (!beside(x, residual) || residual.sizes() != x.sizes())))
        return not_usual();
    Mask mask{PyLong_AsUnsignedLongLong(args[3]), (uint32_t)PyLong_AsUnsignedLong(args[4]),
              (float)PyFloat_AsDouble(args[5]), PyObject_IsTrue(args[6]) == 1, {}};
    for (int i = 0; i < 4; ++i) mask.place[i] = PyLong_AsUnsignedLongLong(args[7 + i]);
    const int64_t n = x.size(-1), parts = PyLong_AsLongLong(args[11]);
    if (PyErr_Occurred()) throw python_error();
    Tensor y;
    void *const stream = stream_of(x);
    {
        NoGil no_gil;
        const Pointer<DropoutNode> node = record<DropoutNode>(x, bias, residual);
        const Below below;
        const c10::OptionalDeviceGuard guard(x.is_cpu() ? std::nullopt : std::optional<at::Device>(x.device()));
        y = at::empty_like(x);
        done("mk_bias_dropout_add", x,
             kernels_of(x).dropout(type_of(x), y.data_ptr(), x.data_ptr(), data(bias), data(residual), x.numel() / n, n,
                                   mask.seed, mask.keep, mask.scale, mask.random, mask.place[0],
                                   (uint32_t)mask.place[1], mask.place[2], mask.place[3], nullptr, 0, stream));
        if (node) {
            node->added = residual.defined(), node->parts = parts, node->mask = mask, node->bias = bias;
            torch::autograd::set_history(y, node);
        }
    }
    return wrap(y);
    END_HANDLE_TH_ERRORS
}

// mixed [s, b, groups * (queries + 2) * d], groups, queries, d, cos, sin (None: nothing is rotated) -> q, k, v
PyObject *split_heads(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &flat = tensor(args[0]), &cos = tensor(args[4]), &sin = tensor(args[5]);
    const int64_t groups = PyLong_AsLongLong(args[1]), queries = PyLong_AsLongLong(args[2]), d = PyLong_AsLongLong(args[3]);
    if (!seen_by_none(args[0], args[4], args[5]) || !flat.is_contiguous() || flat.dim() != 3 || !flat.numel()) return not_usual();
    const bool turns = cos.defined();
    if (turns && (!usual(flat) || !cos.is_contiguous() || !sin.is_contiguous() || cos.scalar_type() != at::kFloat ||
                  cos.dim() != 4 || sin.sizes() != cos.sizes() || cos.device() != flat.device() ||
                  cos.size(0) != flat.size(0) || (cos.size(1) != 1 && cos.size(1) != flat.size(1)) ||
                  2 * cos.size(3) > d))
        return not_usual();
    Tensor q, k, v;
    {
        NoGil no_gil;
        const Pointer<HeadsNode> node = record<HeadsNode>(flat);
        const Below below;
        const c10::OptionalDeviceGuard guard(flat.is_cpu() ? std::nullopt : std::optional<at::Device>(flat.device()));
        const int64_t s = flat.size(0), b = flat.size(1);
        const Tensor mixed = flat.view({s, b, groups, queries + 2, d});
        const Tensor of_q = mixed.narrow(3, 0, queries), of_k = mixed.narrow(3, queries, 1);
        v = mixed.select(3, queries + 1);
        if (turns) {
            q = at::empty({s, b, groups * queries, d}, flat.options());
            k = at::empty({s, b, groups, d}, flat.options());
            turn(q.view({s, b, groups, queries, d}), of_q, cos, sin, 1.0f);
            turn(k.unsqueeze(3), of_k, cos, sin, 1.0f);
        } else {
            q = of_q.reshape({s, b, groups * queries, d});
            k = of_k.squeeze(3);
        }
        if (node) {
            node->shape.assign(mixed.sizes().begin(), mixed.sizes().end());
            node->turns = turns;
            if (turns) {
                node->saved.emplace_back(cos, false);
                node->saved.emplace_back(sin, false);
            }
            torch::autograd::set_history(q, node);
            torch::autograd::set_history(k, node);
            torch::autograd::set_history(v, node);
        }
    }
    return Py_BuildValue("(NNN)", wrap(q), wrap(k), wrap(v));
    END_HANDLE_TH_ERRORS
}

// x, weight, bias, queue, parts, region (None: no messages), column, partial, chunks -> y
PyObject *linear(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &x = tensor(args[0]), &weight = tensor(args[1]), &bias = tensor(args[2]);
    const Region *const region =
        args[5] == Py_None ? nullptr : static_cast<Region *>(PyCapsule_GetPointer(args[5], nullptr));
    const bool column = args[6] == Py_True, cut = region && region->in_sequence;
    const int64_t chunks = PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred()) throw python_error();
    if (!seen_by_none(args[0], args[1], args[2]) || !x.is_contiguous() || x.dim() < 2 || !x.numel() ||
        !weight.is_contiguous() || weight.dim() < 2 ||
        x.scalar_type() != weight.scalar_type() || x.size(-1) != weight.size(-1) ||
        (bias.defined() && (bias.dim() != 1 || bias.scalar_type() != x.scalar_type() || (region && !column))) ||
        (cut && !column && x.size(0) % region->size))
        return not_usual();
    Tensor y;
    Pointer<LinearNode> node;
    {
        NoGil no_gil;
        node = record<LinearNode>(x, weight, bias);
        // Before the product, because recomputation stops once the last tensor has been saved.
        if (node) node->saved.emplace_back(x, false);
        const Below below;
        const Tensor matrix = weight.view({-1, weight.size(-1)}).t();
        Messages messages;
        if (cut && column) y = gathered_product(*region, x, matrix, bias, chunks);
        else if (region && !column) y = summed_product(*region, x, matrix, chunks, messages);
        else y = product(x, matrix, bias);
        wait(messages);
        if (node) {
            node->weight = weight, node->bias = bias, node->region = region, node->column = column;
            node->chunks = chunks;
            node->uses(weight);
            torch::autograd::set_history(y, node);
        }
    }
    if (node) {
        for (int i : {3, 5}) Py_INCREF(args[i]);
        node->queue = Reference(args[3]), node->capsule = Reference(args[5]);
        node->parts = PyLong_AsLongLong(args[4]), node->partial = args[7] == Py_True;
    }
    return wrap(y);
    END_HANDLE_TH_ERRORS
}

// name and size of a group, its flight recorder and its kind, whether there is sequence parallelism, whether messages
// overlap with products, and the function that defers the gradient of a weight whose input has to be gathered ->
// a region
PyObject *region(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const char *const name = PyUnicode_AsUTF8(args[0]);
    if (!name) throw python_error();
    auto made = std::make_unique<Region>();
    made->group = c10d::resolve_process_group(name);
    made->size = PyLong_AsLongLong(args[1]);
    made->in_sequence = args[4] == Py_True, made->overlaps = args[5] == Py_True;
    for (int i : {2, 3, 6}) Py_INCREF(args[i]);
    made->flight = Reference(args[2]), made->kind = Reference(args[3]), made->defer = Reference(args[6]);
    PyObject *const capsule = PyCapsule_New(made.get(), nullptr, [](PyObject *of) {
        delete static_cast<Region *>(PyCapsule_GetPointer(of, nullptr));
    });
    if (capsule) made.release();
    return capsule;
    END_HANDLE_TH_ERRORS
}

// x [n, in], matrices [experts, in, out], rows of each expert -> y [n, out], each expert's rows times its matrix,
// without gradients
PyObject *products(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    const Tensor &x = tensor(args[0]), &matrices = tensor(args[1]);
    if (!seen_by_none(args[0], args[1]) || x.dim() != 2 || matrices.dim() != 3) return not_usual();
    const Reference sequence = checked(PySequence_Fast(args[2], "sizes are a sequence"));
    std::vector<int64_t> sizes;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.object); ++i)
        sizes.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(sequence.object, i)));
    if (PyErr_Occurred()) throw python_error();
    Tensor y;
    {
        NoGil no_gil;
        const at::NoGradGuard no_gradient;
        const std::vector<Tensor> of_x = x.split_with_sizes(sizes), of_matrices = matrices.unbind();
        TORCH_CHECK(of_x.size() == of_matrices.size(), "there are sizes for ", of_x.size(), " of ", of_matrices.size(),
                    " experts");
        y = at::empty({x.size(0), matrices.size(2)}, x.options());
        const std::vector<Tensor> of_y = y.split_with_sizes(sizes);
        for (size_t i = 0; i < of_x.size(); ++i) {
            Tensor out = of_y[i];
            if (sizes[i]) at::mm_out(out, of_x[i], of_matrices[i]);
        }
    }
    return wrap(y);
    END_HANDLE_TH_ERRORS
}

// "cpu" or "cuda", and the addresses of its kernels by name (empty: none) -> None
PyObject *bind(PyObject *, PyObject *const *args, Py_ssize_t) {
    HANDLE_TH_ERRORS
    Kernels &kernels = PyUnicode_CompareWithASCIIString(args[0], "cpu") ? on_gpu : on_cpu;
    kernels = Kernels();
    if (!PyDict_Size(args[1])) Py_RETURN_NONE;
    const auto find = [&](const char *name) -> void * {
        PyObject *const address = PyDict_GetItemString(args[1], name);
        if (!address) throw std::runtime_error(std::string(name) + " is missing");
        return PyLong_AsVoidPtr(address);
    };
#define BIND(MEMBER, NAME) kernels.MEMBER = reinterpret_cast<decltype(kernels.MEMBER)>(find(NAME))
    BIND(norm, "mk_norm");
    BIND(norm_backward, "mk_norm_backward");
    BIND(activation, "mk_bias_activation");
    BIND(activation_backward, "mk_bias_activation_backward");
    BIND(dropout, "mk_bias_dropout_add");
    BIND(dropout_backward, "mk_bias_dropout_add_backward");
    BIND(rotary, "mk_rotary");
    BIND(error, "mk_error");
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// -> watched()
PyObject *is_watched(PyObject *, PyObject *const *, Py_ssize_t) { return PyBool_FromLong(watched()); }

// a value for `repeated` -> its previous value
PyObject *repeat(PyObject *, PyObject *const *args, Py_ssize_t) {
    const int before = repeated;
    repeated = (int)PyLong_AsLong(args[0]);
    return PyLong_FromLong(before);
}

// the class of errors, and the function that returns a device's current stream -> None
PyObject *set_up(PyObject *, PyObject *const *args, Py_ssize_t) {
    kernel_error = args[0], current_stream = args[1];
    for (int i = 0; i < 2; ++i) Py_INCREF(args[i]);
    Py_RETURN_NONE;
}

template <class F> PyMethodDef method(const char *name, F function) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef methods[] = {method("norm", norm),
                         method("bias_activation", bias_activation),
                         method("bias_dropout_add", bias_dropout_add),
                         method("split_heads", split_heads),
                         method("linear", linear),
                         method("region", region),
                         method("products", products),
                         method("watched", is_watched),
                         method("repeat", repeat),
                         method("bind", bind),
                         method("set_up", set_up),
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_nodes", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__nodes() {
    const std::pair<PyObject **, const char *> names[] = {
        {&GRADIENT_SINK, "gradient_accumulator"}, {&DIRECT, "direct"}, {&IN_FP32, "in_fp32"}, {&FRESH, "fresh"},
        {&TOTAL, "total"}, {&PRIVATE_TOTAL, "_total"}, {&BEFORE_USE, "before_use"}, {&ADDED, "added"}, {&ADD, "add"},
        {&ADD_PRODUCT, "add_product"}, {&DEFERRING, "deferring"}, {&WIDENS, "widens"}, {&ENTER, "enter"},
        {&LEAVE, "leave"}};
    for (const auto &[name, text] : names) *name = PyUnicode_InternFromString(text);
    ALL_REDUCE = PyBytes_FromString("all_reduce"), ALL_GATHER = PyBytes_FromString("all_gather");
    REDUCE_SCATTER = PyBytes_FromString("reduce_scatter"), SEQUENCE = Py_BuildValue("(s)", "sequence");
    PyObject *const module = PyModule_Create(&definition);
    if (module) PyModule_AddStringConstant(module, "sources", MK_NODES);
    return module;
}
