"""In the guest: loads the TensorFlow of an unpacked wheel, multiplies two matrices, and stays.

Argument: the folder of the wheel's files. Calls the C interface, because the wheel is made for another version of Python
than the guest's. Source of its functions: TensorFlow `tensorflow/c/c_api.h` and `tf_tensor.h`.
"""
import ctypes
import os
import sys
import time

# `TF_FLOAT` of `tensorflow/c/tf_datatype.h`.
FLOAT = 1


class Output(ctypes.Structure):
    """`TF_Output`: a result of an operation."""

    _fields_ = [("operation", ctypes.c_void_p), ("index", ctypes.c_int)]


def load(folder):
    libraries = [os.path.join(folder, "tensorflow", name) for name in
                 ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]]
    for library in libraries:
        loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    for name in ["TF_NewStatus", "TF_NewGraph", "TF_NewOperation", "TF_FinishOperation", "TF_AllocateTensor",
                 "TF_TensorData", "TF_NewSession", "TF_NewSessionOptions"]:
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.TF_Version.restype = loaded.TF_Message.restype = ctypes.c_char_p
    return loaded


class Graph:
    def __init__(self, library):
        self.library = library
        self.status = ctypes.c_void_p(library.TF_NewStatus())
        self.graph = ctypes.c_void_p(library.TF_NewGraph())

    def check(self):
        if self.library.TF_GetCode(self.status) != 0:
            sys.exit(self.library.TF_Message(self.status).decode())

    def start(self, kind, name):
        operation = self.library.TF_NewOperation(self.graph, kind.encode(), name.encode())
        return ctypes.c_void_p(operation)

    def finish(self, operation):
        done = ctypes.c_void_p(self.library.TF_FinishOperation(operation, self.status))
        self.check()
        return Output(done, 0)

    def constant(self, name, matrix):
        shape = (ctypes.c_int64 * 2)(len(matrix), len(matrix[0]))
        values = [value for row in matrix for value in row]
        tensor = self.library.TF_AllocateTensor(FLOAT, shape, 2, ctypes.c_size_t(4 * len(values)))
        tensor = ctypes.c_void_p(tensor)
        data = self.library.TF_TensorData(tensor)
        ctypes.memmove(data, (ctypes.c_float * len(values))(*values), 4 * len(values))
        operation = self.start("Const", name)
        self.library.TF_SetAttrTensor(operation, b"value", tensor, self.status)
        self.check()
        self.library.TF_SetAttrType(operation, b"dtype", FLOAT)
        return self.finish(operation)

    def product(self, first, second):
        operation = self.start("MatMul", "product")
        self.library.TF_AddInput(operation, first)
        self.library.TF_AddInput(operation, second)
        return self.finish(operation)

    def run(self, output, count):
        options = ctypes.c_void_p(self.library.TF_NewSessionOptions())
        session = ctypes.c_void_p(self.library.TF_NewSession(self.graph, options, self.status))
        self.check()
        outputs, tensors = (Output * 1)(output), (ctypes.c_void_p * 1)()
        self.library.TF_SessionRun(session, None, None, None, 0, outputs, tensors, 1, None, 0, None, self.status)
        self.check()
        data = self.library.TF_TensorData(ctypes.c_void_p(tensors[0]))
        return list((ctypes.c_float * count).from_address(data))


def main():
    library = load(sys.argv[1])
    print(library.TF_Version().decode(), file=sys.stderr)
    graph = Graph(library)
    product = graph.product(graph.constant("first", [[1, 2], [3, 4]]), graph.constant("second", [[5, 6], [7, 8]]))
    values = graph.run(product, 4)
    # By hand: 1*5+2*7, 1*6+2*8, 3*5+4*7, 3*6+4*8.
    if values != [19, 22, 43, 50]:
        sys.exit(f"wrong product: {values}")
    print("READY", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
