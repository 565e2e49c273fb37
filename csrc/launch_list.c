/* A list of launches, kernels and cuBLASLt GEMMs, that one call from Python queues on a stream, with the memory that
 * they need allocated.
 *
 * The list keeps everything but addresses. These come from tensors: its inputs, and what it allocates with callables of
 * Python. The functions that queue are addresses, and tensors are asked by name, so this file needs no header but
 * Python's, and a test can give its own.
 *
 * `kernels/launch_list.py` makes lists and compiles this file with the compiler that Triton uses.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_SLOTS = 64, MOST_PARAMETERS = 48, MOST_POINTERS = 5, ALGORITHM_BYTES = 64, NUM_OPERANDS = 4 };

/* cuLaunchKernel, cublasLtMatmul and cublasLtMatmulDescSetAttribute. Handles are pointers, statuses are enumerations. */
typedef int (*LaunchKernel)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned shared_bytes, void *stream, void **parameters, void **extra);
typedef int (*Matmul)(void *handle, void *descriptor, const void *alpha, const void *a, void *layout_a, const void *b,
                      void *layout_b, const void *beta, const void *c, void *layout_c, void *d, void *layout_d,
                      const void *algorithm, void *workspace, size_t workspace_bytes, void *stream);
typedef int (*SetAttribute)(void *descriptor, int attribute, const void *value, size_t bytes);

typedef struct {
    void *function;
    unsigned width, height, threads, shared_bytes;
    int num_parameters;
    int slots[MOST_PARAMETERS]; /* −1: the parameter is a number, in `values` */
    uint64_t values[MOST_PARAMETERS];
} KernelLaunch;

typedef struct {
    void *handle, *descriptor, *layouts[NUM_OPERANDS];
    float alpha, beta;
    unsigned char algorithm[ALGORITHM_BYTES];
    size_t workspace_bytes;
    int operands[NUM_OPERANDS]; /* slots of A, B, C and D; −1: none */
    int num_pointers;
    int attributes[MOST_POINTERS], slots[MOST_POINTERS];
} MatmulLaunch;

typedef struct {
    int is_matmul;
    union {
        KernelLaunch kernel;
        MatmulLaunch matmul;
    };
} Step;

typedef struct {
    PyObject *make;    /* () → tensor; NULL: it is a part of another allocation */
    uint64_t released; /* by bit, the allocations that are given back before it */
    uint64_t offset;   /* of a part, in bytes */
    Py_ssize_t whole;  /* of a part, the other allocation */
} Allocation;

/* What Python says of the moment: () → device, (device) → stream, () → bool, (device, stream) → tensor. */
enum { CURRENT_DEVICE, CURRENT_STREAM, IS_WATCHED, WORKSPACE, NUM_QUESTIONS };

typedef struct {
    PyObject_HEAD
    LaunchKernel launch_kernel;
    Matmul matmul;
    SetAttribute set_attribute;
    Py_ssize_t num_slots, num_steps;
    uint64_t *alignments; /* of each slot, minus one */
    Step *steps;
    long device;
    PyObject *questions[NUM_QUESTIONS];
    Py_ssize_t num_inputs, num_allocations, num_outputs;
    Allocation allocations[MOST_SLOTS];
    Py_ssize_t outputs[MOST_SLOTS]; /* places among inputs, then allocations; −1: None */
    PyObject *kept;
    PyObject *workspace; /* of `stream`; NULL so far */
    uint64_t stream, workspace_address;
} LaunchList;

static PyObject *data_ptr, *get_device; /* names */

static void drop_surroundings(LaunchList *self) {
    for (int i = 0; i < NUM_QUESTIONS; i++) Py_CLEAR(self->questions[i]);
    for (Py_ssize_t i = 0; i < self->num_allocations; i++) Py_CLEAR(self->allocations[i].make);
    self->num_allocations = 0;
    Py_CLEAR(self->kept);
    Py_CLEAR(self->workspace);
}

static void dealloc(LaunchList *self) {
    drop_surroundings(self);
    PyMem_Free(self->alignments);
    PyMem_Free(self->steps);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void *as_pointer(unsigned long long address) { return (void *)(uintptr_t)address; }

static int init(LaunchList *self, PyObject *args, PyObject *keywords) {
    unsigned long long launch_kernel, matmul, set_attribute;
    PyObject *alignments;
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "LaunchList takes no keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "KKKO!", &launch_kernel, &matmul, &set_attribute, &PyTuple_Type, &alignments))
        return -1;
    self->launch_kernel = (LaunchKernel)as_pointer(launch_kernel);
    self->matmul = (Matmul)as_pointer(matmul);
    self->set_attribute = (SetAttribute)as_pointer(set_attribute);
    self->num_slots = PyTuple_GET_SIZE(alignments);
    if (self->num_slots > MOST_SLOTS) {
        PyErr_Format(PyExc_ValueError, "%zd slots; a list has %d at most", self->num_slots, MOST_SLOTS);
        return -1;
    }
    PyMem_Free(self->alignments);
    self->alignments = PyMem_Calloc((size_t)self->num_slots + 1, sizeof(uint64_t));
    if (self->alignments == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t slot = 0; slot < self->num_slots; slot++) {
        unsigned long long alignment = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(alignments, slot));
        if (PyErr_Occurred()) return -1;
        if (alignment == 0 || (alignment & (alignment - 1))) {
            PyErr_Format(PyExc_ValueError, "an alignment of %llu bytes is no power of two", alignment);
            return -1;
        }
        self->alignments[slot] = alignment - 1;
    }
    return 0;
}

static int is_slot(const LaunchList *self, int slot) {
    if (slot >= -1 && slot < self->num_slots) return 1;
    PyErr_Format(PyExc_ValueError, "there is no slot %d: the list has %zd", slot, self->num_slots);
    return 0;
}

static Step *new_step(LaunchList *self) {
    Step *steps = PyMem_Realloc(self->steps, (size_t)(self->num_steps + 1) * sizeof(Step));
    if (steps == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->steps = steps;
    memset(&steps[self->num_steps], 0, sizeof(Step));
    return &steps[self->num_steps];
}

PyDoc_STRVAR(add_kernel_doc,
             "add_kernel(function, width, height, threads, shared_bytes, parameters)\n\n"
             "parameters: (slot, value) each; slot -1 gives the value itself, at most 8 bytes as an unsigned number.");

static PyObject *add_kernel(LaunchList *self, PyObject *args) {
    unsigned long long function;
    KernelLaunch launch = {0};
    PyObject *parameters;
    if (!PyArg_ParseTuple(args, "KIIIIO!", &function, &launch.width, &launch.height, &launch.threads,
                          &launch.shared_bytes, &PyTuple_Type, &parameters))
        return NULL;
    if (PyTuple_GET_SIZE(parameters) > MOST_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "a kernel with %zd parameters; a list takes %d",
                            PyTuple_GET_SIZE(parameters), MOST_PARAMETERS);
    launch.function = as_pointer(function);
    launch.num_parameters = (int)PyTuple_GET_SIZE(parameters);
    for (int i = 0; i < launch.num_parameters; i++) {
        unsigned long long value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "iK", &launch.slots[i], &value)) return NULL;
        if (!is_slot(self, launch.slots[i])) return NULL;
        launch.values[i] = value;
    }
    Step *step = new_step(self);
    if (step == NULL) return NULL;
    step->kernel = launch;
    self->num_steps++;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(add_matmul_doc,
             "add_matmul(handle, descriptor, layouts, beta, algorithm, workspace_bytes, operands, pointers)\n\n"
             "layouts, operands: of A, B, C and D; operands are slots, -1 for none. pointers: (attribute, slot) each.");

static PyObject *add_matmul(LaunchList *self, PyObject *args) {
    unsigned long long handle, descriptor, layouts[NUM_OPERANDS];
    MatmulLaunch launch = {.alpha = 1.0f};
    Py_buffer algorithm;
    Py_ssize_t workspace_bytes;
    PyObject *pointers;
    if (!PyArg_ParseTuple(args, "KK(KKKK)fy*n(iiii)O!", &handle, &descriptor, &layouts[0], &layouts[1], &layouts[2],
                          &layouts[3], &launch.beta, &algorithm, &workspace_bytes, &launch.operands[0],
                          &launch.operands[1], &launch.operands[2], &launch.operands[3], &PyTuple_Type, &pointers))
        return NULL;
    int is_whole = algorithm.len == ALGORITHM_BYTES;
    if (is_whole) memcpy(launch.algorithm, algorithm.buf, ALGORITHM_BYTES);
    PyBuffer_Release(&algorithm);
    if (!is_whole || PyTuple_GET_SIZE(pointers) > MOST_POINTERS) {
        PyErr_SetString(PyExc_ValueError, "an algorithm has 64 bytes, and a GEMM at most 5 pointers");
        return NULL;
    }
    launch.handle = as_pointer(handle);
    launch.descriptor = as_pointer(descriptor);
    launch.workspace_bytes = (size_t)workspace_bytes;
    for (int i = 0; i < NUM_OPERANDS; i++) {
        launch.layouts[i] = as_pointer(layouts[i]);
        if (!is_slot(self, launch.operands[i])) return NULL;
    }
    launch.num_pointers = (int)PyTuple_GET_SIZE(pointers);
    for (int i = 0; i < launch.num_pointers; i++) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pointers, i), "ii", &launch.attributes[i], &launch.slots[i]))
            return NULL;
        if (!is_slot(self, launch.slots[i])) return NULL;
    }
    Step *step = new_step(self);
    if (step == NULL) return NULL;
    step->is_matmul = 1;
    step->matmul = launch;
    self->num_steps++;
    Py_RETURN_NONE;
}

static int queue_kernel(const LaunchList *self, KernelLaunch *launch, const uint64_t *addresses, void *stream) {
    void *parameters[MOST_PARAMETERS];
    for (int i = 0; i < launch->num_parameters; i++) {
        if (launch->slots[i] >= 0) launch->values[i] = addresses[launch->slots[i]];
        parameters[i] = &launch->values[i];
    }
    return self->launch_kernel(launch->function, launch->width, launch->height, 1, launch->threads, 1, 1,
                               launch->shared_bytes, stream, parameters, NULL);
}

static int queue_matmul(const LaunchList *self, const MatmulLaunch *launch, const uint64_t *addresses, void *stream,
                        void *workspace) {
    void *operands[NUM_OPERANDS];
    for (int i = 0; i < launch->num_pointers; i++) {
        void *pointer = as_pointer(launch->slots[i] < 0 ? 0 : addresses[launch->slots[i]]);
        int status = self->set_attribute(launch->descriptor, launch->attributes[i], &pointer, sizeof(pointer));
        if (status) return status;
    }
    for (int i = 0; i < NUM_OPERANDS; i++)
        operands[i] = as_pointer(launch->operands[i] < 0 ? 0 : addresses[launch->operands[i]]);
    return self->matmul(launch->handle, launch->descriptor, &launch->alpha, operands[0], launch->layouts[0],
                        operands[1], launch->layouts[1], &launch->beta, operands[2], launch->layouts[2], operands[3],
                        launch->layouts[3], launch->algorithm, workspace, launch->workspace_bytes, stream);
}

PyDoc_STRVAR(surround_doc,
             "surround(device, questions, num_inputs, allocations, outputs, kept)\n\n"
             "What a replay does around its launches. questions: what gives the current device, the stream of a device,\n"
             "whether launches are watched, and the workspace of a device and stream. allocations: in order, what makes\n"
             "a tensor, and the places of those allocations that are given back before; or the bytes at which it starts\n"
             "in another allocation, and the other's place. outputs: places among the inputs, then the allocations; -1\n"
             "for None. kept: what the launches need to stay.");

/* An allocation that lies in another one. 0, or −1 for an error. */
static int read_part(PyObject *pair, Allocation *part) {
    PyObject *offset, *whole;
    if (!PyArg_ParseTuple(pair, "O!O!", &PyLong_Type, &offset, &PyLong_Type, &whole)) return -1;
    *part = (Allocation){NULL, 0, PyLong_AsUnsignedLongLong(offset), PyErr_Occurred() ? -1 : PyLong_AsSsize_t(whole)};
    return PyErr_Occurred() ? -1 : 0;
}

/* An allocation of its own, the `i`th. 0, or −1 for an error. */
static int read_allocation(PyObject *pair, Py_ssize_t i, Allocation *allocation) {
    PyObject *make, *places;
    if (!PyArg_ParseTuple(pair, "OO!", &make, &PyTuple_Type, &places)) return -1;
    uint64_t released = 0;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(places); k++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, k));
        if (PyErr_Occurred()) return -1;
        if (place < 0 || place >= i) {
            PyErr_Format(PyExc_ValueError, "allocation %zd cannot follow the release of %zd", i, place);
            return -1;
        }
        released |= (uint64_t)1 << place;
    }
    *allocation = (Allocation){Py_NewRef(make), released, 0, -1};
    return 0;
}

static PyObject *surround(LaunchList *self, PyObject *args) {
    PyObject *questions[NUM_QUESTIONS], *allocations, *outputs, *kept;
    long device;
    Py_ssize_t num_inputs;
    if (!PyArg_ParseTuple(args, "l(OOOO)nO!O!O", &device, &questions[0], &questions[1], &questions[2], &questions[3],
                          &num_inputs, &PyTuple_Type, &allocations, &PyTuple_Type, &outputs, &kept))
        return NULL;
    Py_ssize_t num_allocations = PyTuple_GET_SIZE(allocations), num_outputs = PyTuple_GET_SIZE(outputs);
    if (num_inputs < 0 || num_inputs + num_allocations != self->num_slots || num_outputs > MOST_SLOTS)
        return PyErr_Format(PyExc_ValueError, "%zd inputs and %zd allocations for %zd slots, and %zd outputs",
                            num_inputs, num_allocations, self->num_slots, num_outputs);
    drop_surroundings(self);
    for (Py_ssize_t i = 0; i < num_allocations; i++) {
        PyObject *pair = PyTuple_GET_ITEM(allocations, i);
        int is_part = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) && PyLong_Check(PyTuple_GET_ITEM(pair, 0));
        if (is_part ? read_part(pair, &self->allocations[i]) : read_allocation(pair, i, &self->allocations[i]))
            return NULL;
        self->num_allocations = i + 1;
    }
    for (Py_ssize_t i = 0; i < num_allocations; i++) {
        const Allocation *part = &self->allocations[i];
        if (part->make != NULL) continue;
        if (part->whole < 0 || part->whole >= num_allocations || self->allocations[part->whole].make == NULL)
            return PyErr_Format(PyExc_ValueError, "allocation %zd cannot be a part of %zd", i, part->whole);
    }
    for (Py_ssize_t i = 0; i < num_outputs; i++) {
        self->outputs[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(outputs, i));
        if (PyErr_Occurred()) return NULL;
        if (self->outputs[i] < -1 || self->outputs[i] >= self->num_slots)
            return PyErr_Format(PyExc_ValueError, "there is no output %zd: the list has %zd", self->outputs[i],
                                self->num_slots);
        if (self->outputs[i] >= num_inputs && self->allocations[self->outputs[i] - num_inputs].make == NULL)
            return PyErr_Format(PyExc_ValueError, "output %zd is a part of another allocation", self->outputs[i]);
    }
    self->device = device;
    self->num_inputs = num_inputs;
    self->num_outputs = num_outputs;
    self->kept = Py_NewRef(kept);
    for (int i = 0; i < NUM_QUESTIONS; i++) self->questions[i] = Py_NewRef(questions[i]);
    Py_RETURN_NONE;
}

/* An int as a number, whose reference it takes. An error is left to PyErr_Occurred. */
static long long taken_number(PyObject *number) {
    if (number == NULL) return -1;
    long long value = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return value;
}

static uint64_t address_of(PyObject *tensor) {
    return (uint64_t)taken_number(PyObject_VectorcallMethod(data_ptr, &tensor, 1, NULL));
}

static long long device_of(PyObject *tensor) {
    return taken_number(PyObject_VectorcallMethod(get_device, &tensor, 1, NULL));
}

/* Whether launches may be queued from here now: 1, 0, or −1 for an error. */
static int is_the_moment(const LaunchList *self) {
    long long device = taken_number(PyObject_CallNoArgs(self->questions[CURRENT_DEVICE]));
    if (PyErr_Occurred()) return -1;
    if (device != self->device) return 0;
    PyObject *watched = PyObject_CallNoArgs(self->questions[IS_WATCHED]);
    if (watched == NULL) return -1;
    int is_watched = PyObject_IsTrue(watched);
    Py_DECREF(watched);
    return is_watched < 0 ? -1 : !is_watched;
}

/* The current stream, and its workspace in `self`. 0, or −1 for an error. */
static int find_stream(LaunchList *self) {
    PyObject *device = PyLong_FromLong(self->device);
    if (device == NULL) return -1;
    PyObject *stream = PyObject_CallOneArg(self->questions[CURRENT_STREAM], device);
    uint64_t number = stream == NULL ? 0 : PyLong_AsUnsignedLongLong(stream);
    if (!PyErr_Occurred() && (self->workspace == NULL || number != self->stream)) {
        Py_XSETREF(self->workspace,
                   PyObject_CallFunctionObjArgs(self->questions[WORKSPACE], device, stream, NULL));
        if (self->workspace != NULL) self->workspace_address = address_of(self->workspace);
        self->stream = number;
    }
    Py_XDECREF(stream);
    Py_DECREF(device);
    if (!PyErr_Occurred()) return 0;
    Py_CLEAR(self->workspace);
    return -1;
}

static int queue(LaunchList *self, const uint64_t *addresses) {
    void *stream = as_pointer(self->stream), *workspace = as_pointer(self->workspace_address);
    for (Py_ssize_t i = 0; i < self->num_steps; i++) {
        Step *step = &self->steps[i];
        int status = step->is_matmul ? queue_matmul(self, &step->matmul, addresses, stream, workspace)
                                     : queue_kernel(self, &step->kernel, addresses, stream);
        if (status) {
            PyErr_Format(PyExc_RuntimeError, "launch %zd of a list, a %s, failed with status %d", i,
                         step->is_matmul ? "GEMM" : "kernel", status);
            return -1;
        }
    }
    return 0;
}

static PyObject *outputs_of(const LaunchList *self, PyObject *const *tensors) {
    PyObject *outputs = PyTuple_New(self->num_outputs);
    if (outputs == NULL) return NULL;
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) {
        PyObject *output = self->outputs[i] < 0 ? NULL : tensors[self->outputs[i]];
        PyTuple_SET_ITEM(outputs, i, Py_NewRef(output == NULL ? Py_None : output));
    }
    return outputs;
}

PyDoc_STRVAR(replay_doc,
             "replay(inputs) -> tuple | None\n\n"
             "Allocate, queue all launches, and give the outputs. None, and nothing is queued, if an input is on another\n"
             "device, an address is not aligned as its slot requires, or it is not the moment.");

/* The interpreter's lock is kept: launches write the list's own values, and take some microseconds together. */
static PyObject *replay(LaunchList *self, PyObject *inputs) {
    if (self->kept == NULL || !PyTuple_CheckExact(inputs) || PyTuple_GET_SIZE(inputs) != self->num_inputs)
        return PyErr_Format(PyExc_TypeError, "replay takes a tuple of %zd tensors, after surround", self->num_inputs);
    int may_go = is_the_moment(self);
    if (may_go < 0) return NULL;
    if (!may_go) Py_RETURN_NONE;

    PyObject *tensors[MOST_SLOTS];
    uint64_t addresses[MOST_SLOTS], misaligned = 0;
    for (Py_ssize_t i = 0; i < self->num_inputs; i++) {
        tensors[i] = PyTuple_GET_ITEM(inputs, i);
        addresses[i] = 0;
        if (tensors[i] == Py_None) continue;
        long long device = device_of(tensors[i]);
        if (PyErr_Occurred()) return NULL;
        if (device != self->device) Py_RETURN_NONE;
        addresses[i] = address_of(tensors[i]);
        if (PyErr_Occurred()) return NULL;
    }

    PyObject **made = &tensors[self->num_inputs], *result = NULL;
    Py_ssize_t num_made = 0;
    for (; num_made < self->num_allocations; num_made++) {
        const Allocation *allocation = &self->allocations[num_made];
        made[num_made] = NULL;
        if (allocation->make == NULL) continue;
        for (Py_ssize_t place = 0; place < num_made; place++)
            if (allocation->released >> place & 1) Py_CLEAR(made[place]); /* its memory can be taken again, as it was */
        made[num_made] = PyObject_CallNoArgs(allocation->make);
        addresses[self->num_inputs + num_made] = made[num_made] == NULL ? 0 : address_of(made[num_made]);
        if (PyErr_Occurred()) {
            num_made++;
            goto end;
        }
    }
    for (Py_ssize_t i = 0; i < self->num_allocations; i++) {
        const Allocation *part = &self->allocations[i];
        if (part->make == NULL)
            addresses[self->num_inputs + i] = addresses[self->num_inputs + part->whole] + part->offset;
    }
    for (Py_ssize_t slot = 0; slot < self->num_slots; slot++) misaligned |= addresses[slot] & self->alignments[slot];
    if (misaligned) {
        result = Py_NewRef(Py_None);
        goto end;
    }
    if (find_stream(self) == 0 && queue(self, addresses) == 0) result = outputs_of(self, tensors);
end:
    for (Py_ssize_t place = 0; place < num_made; place++) Py_XDECREF(made[place]);
    return result;
}

static PyMethodDef methods[] = {
    {"add_kernel", (PyCFunction)add_kernel, METH_VARARGS, add_kernel_doc},
    {"add_matmul", (PyCFunction)add_matmul, METH_VARARGS, add_matmul_doc},
    {"surround", (PyCFunction)surround, METH_VARARGS, surround_doc},
    {"replay", (PyCFunction)replay, METH_O, replay_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LaunchListType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fp8_megatron_launch_list.LaunchList",
    .tp_doc = "LaunchList(cuLaunchKernel, cublasLtMatmul, cublasLtMatmulDescSetAttribute, alignments): of each slot",
    .tp_basicsize = sizeof(LaunchList),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fp8_megatron_launch_list", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_fp8_megatron_launch_list(void) {
    if (PyType_Ready(&LaunchListType) < 0) return NULL;
    data_ptr = PyUnicode_InternFromString("data_ptr");
    get_device = PyUnicode_InternFromString("get_device");
    if (data_ptr == NULL || get_device == NULL) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddObjectRef(made, "LaunchList", (PyObject *)&LaunchListType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
