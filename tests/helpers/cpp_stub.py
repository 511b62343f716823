"""STUB headers of TensorRT and of the CUDA runtime, with as much as the C++ program for an engine calls.

Memory of the stub is ordinary memory, and work on a stream is done only when the program waits for it. An engine is a
text: batch, outputs, side of an image, and 1 if it is of bytes, of which none runs; it answers with four times the mean
of every so-many-th number. Nothing here says anything about a real GPU. `STUB_FAILS` names a call that fails.
"""

from __future__ import annotations

from pathlib import Path

CUDA = r"""
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
constexpr unsigned cudaStreamNonBlocking = 1;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
using Work = std::vector<std::function<void()>>;
struct CUstream_st { Work work; Work* captured = nullptr; };
using cudaStream_t = CUstream_st*;
using cudaGraph_t = Work*;
using cudaGraphExec_t = Work*;

namespace stub {
struct Ledger {
    std::set<void*> taken;
    bool wrong = false;
    ~Ledger() { std::fprintf(stderr, "kept: %zu%s\n", taken.size(), wrong ? ", given back twice" : ""); }
};
inline Ledger ledger;
inline void* take(void* what) { ledger.taken.insert(what); return what; }
inline void give(void* what) { ledger.wrong |= ledger.taken.erase(what) == 0; }
inline int code(char const* call) {
    char const* fails = std::getenv("STUB_FAILS");
    return fails != nullptr && std::strcmp(fails, call) == 0 ? 2 : cudaSuccess;
}
inline void put(cudaStream_t stream, std::function<void()> step) {
    (stream->captured != nullptr ? *stream->captured : stream->work).push_back(std::move(step));
}
}  // namespace stub

inline char const* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline cudaError_t cudaMalloc(void** to, std::size_t size) {
    if (stub::code("cudaMalloc") != 0) return 2;
    *to = stub::take(std::malloc(size));
    return 0;
}
inline cudaError_t cudaMallocHost(void** to, std::size_t size) {
    if (stub::code("cudaMallocHost") != 0) return 2;
    *to = stub::take(std::malloc(size));
    return 0;
}
inline cudaError_t cudaFree(void* what) { stub::give(what); std::free(what); return 0; }
inline cudaError_t cudaFreeHost(void* what) { return cudaFree(what); }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned) {
    *to = new CUstream_st;
    stub::take(*to);
    return 0;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t what) { stub::give(what); delete what; return 0; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    for (auto const& step : stream->work) step();
    stream->work.clear();
    return stub::code("cudaStreamSynchronize");
}
inline cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t size, cudaMemcpyKind, cudaStream_t stream) {
    stub::put(stream, [=] { std::memcpy(to, from, size); });
    return 0;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->captured = new Work;
    return 0;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* to) {
    *to = stream->captured;
    stub::take(*to);
    stream->captured = nullptr;
    return 0;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph, unsigned long long) {
    *to = new Work(*graph);
    stub::take(*to);
    return 0;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t what) { stub::give(what); delete what; return 0; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t what) { stub::give(what); delete what; return 0; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    for (auto const& step : *graph) stub::put(stream, step);
    std::fprintf(stderr, "launched\n");
    return 0;
}
"""

TENSORRT = r"""
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <sstream>

namespace nvinfer1 {
struct Dims { std::int32_t nbDims; std::int64_t d[8]; };
enum class DataType { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8 };
enum class TensorIOMode { kNONE, kINPUT, kOUTPUT };
struct ILogger {
    enum class Severity { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, char const* text) noexcept = 0;
    virtual ~ILogger() = default;
};
struct Plan { int batch = 0, outputs = 0, side = 0, bytes = 0; };

struct IExecutionContext {
    Plan plan;
    void* images = nullptr;
    void* answers = nullptr;
    ~IExecutionContext() { stub::give(this); }
    bool setInputShape(char const*, Dims const& dims) { return dims.nbDims == 4 && dims.d[0] == plan.batch; }
    bool setTensorAddress(char const* name, void* where) {
        (std::strcmp(name, "images") == 0 ? images : answers) = where;
        return true;
    }
    bool enqueueV3(cudaStream_t stream) {
        if (stub::code("enqueueV3") != 0) return false;
        stub::put(stream, [this] { run(); });
        return true;
    }
    void run() const {
        int const size = 3 * plan.side * plan.side;
        for (int b = 0; b < plan.batch; ++b) {
            for (int k = 0; k < plan.outputs; ++k) {
                double sum = 0;
                int count = 0;
                for (int i = k; i < size; i += plan.outputs, ++count) {
                    sum += static_cast<float*>(images)[b * size + i];
                }
                static_cast<float*>(answers)[b * plan.outputs + k] = static_cast<float>(4 * sum / count);
            }
        }
    }
};

struct ICudaEngine {
    Plan plan;
    ~ICudaEngine() { stub::give(this); }
    int getNbIOTensors() const { return 2; }
    char const* getIOTensorName(int i) const { return i == 0 ? "images" : "logits"; }
    TensorIOMode getTensorIOMode(char const* name) const {
        return std::strcmp(name, "images") == 0 ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
    }
    DataType getTensorDataType(char const* name) const {
        return std::strcmp(name, "images") == 0 && plan.bytes != 0 ? DataType::kUINT8 : DataType::kFLOAT;
    }
    Dims getTensorShape(char const* name) const {
        if (std::strcmp(name, "images") != 0) return {2, {-1, plan.outputs}};
        if (plan.bytes != 0) return {4, {-1, plan.side, plan.side, 3}};
        return {4, {-1, 3, plan.side, plan.side}};
    }
    IExecutionContext* createExecutionContext() {
        auto* made = new IExecutionContext{plan};
        stub::take(made);
        return made;
    }
};

struct IRuntime {
    ILogger& log;
    ~IRuntime() { stub::give(this); }
    ICudaEngine* deserializeCudaEngine(void const* data, std::size_t size) {
        std::istringstream text(std::string(static_cast<char const*>(data), size));
        Plan plan;
        if (!(text >> plan.batch >> plan.outputs >> plan.side >> plan.bytes)) {
            log.log(ILogger::Severity::kERROR, "magicTag does not match");
            log.log(ILogger::Severity::kERROR, "a consequence of that");
            return nullptr;
        }
        auto* made = new ICudaEngine{plan};
        stub::take(made);
        return made;
    }
};
inline IRuntime* createInferRuntime(ILogger& log) {
    auto* made = new IRuntime{log};
    stub::take(made);
    return made;
}
}  // namespace nvinfer1
"""


def write_headers(folder: Path) -> Path:
    """Write both headers into a folder, to be given to a compiler."""
    folder.mkdir()
    (folder / "cuda_runtime_api.h").write_text(CUDA)
    (folder / "NvInfer.h").write_text(TENSORRT)
    return folder


def write_engine(path: Path, batch: int, outputs: int, side: int, takes_bytes: bool = False) -> Path:
    """Write an engine of the stub, for square images."""
    path.write_text(f"{batch} {outputs} {side} {int(takes_bytes)}")
    return path
