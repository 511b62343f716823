// Classify images with a TensorRT engine.
//
//     classify ENGINE image.ppm [more.ppm ...] [--labels labels.txt] [--graph]
//
// --graph starts all kernels with one call (a CUDA graph). Images are binary PPM; turn others into it, upright:
//     ffmpeg -i image.jpg image.ppm        or        convert image.jpg -auto-orient image.ppm
// In a program of your own, give `snapvit::placed` the RGB bytes of your camera or decoder instead of `read_ppm`.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>

#include "model.h"

namespace {

struct Log : nvinfer1::ILogger {
    std::string first_error = "it gave no reason";
    bool has_error = false;

    void log(Severity severity, char const* text) noexcept override {
        if (severity <= Severity::kERROR && !has_error) {
            first_error = text;
            has_error = true;
        }
    }
};

void check(cudaError_t code, char const* what) {
    if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

struct FreeDevice {
    void operator()(void* memory) const { cudaFree(memory); }
};
struct FreeHost {
    void operator()(void* memory) const { cudaFreeHost(memory); }
};
using DeviceMemory = std::unique_ptr<void, FreeDevice>;
using HostMemory = std::unique_ptr<void, FreeHost>;  // pinned: the GPU copies from and to it without a detour

DeviceMemory on_device(std::size_t size) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, size), "no memory on the GPU");
    return DeviceMemory(memory);
}

HostMemory on_host(std::size_t size) {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, size), "no pinned memory");
    return HostMemory(memory);
}

struct Stream {
    cudaStream_t handle = nullptr;
    Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "no stream"); }
    ~Stream() { cudaStreamDestroy(handle); }
    Stream(Stream const&) = delete;
    Stream& operator=(Stream const&) = delete;
};

constexpr std::streamoff kMostBytes = std::streamoff{1} << 36;

std::vector<char> read_file(std::string const& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) throw std::runtime_error(path + ": cannot be opened");
    std::streamoff const size = file.tellg();
    if (size < 0 || size > kMostBytes) throw std::runtime_error(path + ": is no file of an engine");  // a folder
    std::vector<char> data(static_cast<std::size_t>(size));
    file.seekg(0);
    if (!file.read(data.data(), size)) throw std::runtime_error(path + ": cannot be read to its end");
    return data;
}

// Return true if a shape is this one; -1 in the place of the batch stands for any.
bool matches(nvinfer1::Dims const& found, std::vector<int> const& wanted) {
    if (found.nbDims != static_cast<int>(wanted.size())) return false;
    for (int i = 0; i < found.nbDims; ++i) {
        if (found.d[i] != wanted[i] && !(i == 0 && found.d[i] == -1)) return false;
    }
    return true;
}

// The engine with its memory, taken once.
class Engine {
public:
    Engine(std::string const& path, bool with_graph) : path_(path) {
        std::vector<char> const data = read_file(path);
        runtime_.reset(nvinfer1::createInferRuntime(log_));
        if (!runtime_) fail("TensorRT does not start: " + log_.first_error);
        engine_.reset(runtime_->deserializeCudaEngine(data.data(), data.size()));
        if (!engine_) fail("cannot be loaded: " + log_.first_error + ". Build it on this device");
        check_tensors();
        context_.reset(engine_->createExecutionContext());
        if (!context_) fail("no memory to run it: " + log_.first_error);
        nvinfer1::Dims dims{};
        dims.nbDims = 4;
        for (int i = 0; i < 4; ++i) dims.d[i] = input_shape()[i];
        if (!context_->setInputShape(model::kInput, dims)) fail("was not built for this batch");
        bool const bound = context_->setTensorAddress(model::kInput, images_.get()) &&
                           context_->setTensorAddress(model::kOutput, answers_.get());
        if (!bound) fail("refuses an address");
        if (with_graph) capture();
    }

    ~Engine() {
        if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    }
    Engine(Engine const&) = delete;
    Engine& operator=(Engine const&) = delete;

    // The place of an image in the input of the next run.
    void set_image(int number, snapvit::Image const& image) {
        std::size_t const size = kInputBytes / model::kBatch;
        char* const to = static_cast<char*>(host_images_.get()) + size * static_cast<std::size_t>(number);
        if (model::kTakesBytes) {
            std::memcpy(to, image.rgb.data(), size);
        } else {
            snapvit::normalise(image, model::kSteps, reinterpret_cast<float*>(to));
        }
    }

    // Run the batch; return its outputs, which the next run overwrites.
    float const* run() {
        auto const to = cudaMemcpyHostToDevice, from = cudaMemcpyDeviceToHost;
        check(cudaMemcpyAsync(images_.get(), host_images_.get(), kInputBytes, to, stream_.handle), "copying to the GPU");
        if (graph_ != nullptr) {
            check(cudaGraphLaunch(graph_, stream_.handle), "starting the graph");
        } else {
            enqueue();
        }
        check(cudaMemcpyAsync(host_answers_.get(), answers_.get(), kOutputBytes, from, stream_.handle), "copying back");
        check(cudaStreamSynchronize(stream_.handle), "running");  // until here nothing has happened
        return static_cast<float const*>(host_answers_.get());
    }

private:
    static constexpr std::size_t kPixels = static_cast<std::size_t>(model::kSteps.height) * model::kSteps.width * 3;
    static constexpr std::size_t kInputBytes = kPixels * model::kBatch * (model::kTakesBytes ? 1 : sizeof(float));
    static constexpr std::size_t kOutputBytes = sizeof(float) * model::kBatch * model::kOutputs;

    static std::vector<int> input_shape() {
        int const h = model::kSteps.height, w = model::kSteps.width;
        if (model::kTakesBytes) return {model::kBatch, h, w, 3};
        return {model::kBatch, 3, h, w};
    }

    [[noreturn]] void fail(std::string const& why) const { throw std::runtime_error(path_ + ": " + why); }

    // Refuse the engine of another graph.
    void check_tensors() const {
        auto const kind = model::kTakesBytes ? nvinfer1::DataType::kUINT8 : nvinfer1::DataType::kFLOAT;
        int inputs = 0, outputs = 0;
        for (int i = 0; i < engine_->getNbIOTensors(); ++i) {
            char const* name = engine_->getIOTensorName(i);
            inputs += std::strcmp(name, model::kInput) == 0;
            outputs += std::strcmp(name, model::kOutput) == 0;
        }
        bool const known = engine_->getNbIOTensors() == 2 && inputs == 1 && outputs == 1;
        if (!known || engine_->getTensorIOMode(model::kInput) != nvinfer1::TensorIOMode::kINPUT ||
            engine_->getTensorDataType(model::kInput) != kind ||
            engine_->getTensorDataType(model::kOutput) != nvinfer1::DataType::kFLOAT ||
            !matches(engine_->getTensorShape(model::kInput), input_shape()) ||
            !matches(engine_->getTensorShape(model::kOutput), {model::kBatch, model::kOutputs})) {
            fail("is the engine of another graph");
        }
    }

    void enqueue() {
        if (!context_->enqueueV3(stream_.handle)) fail("did not run: " + log_.first_error);
    }

    void capture() {
        enqueue();  // the first run takes memory, which a capture must not
        check(cudaStreamSynchronize(stream_.handle), "running");
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeRelaxed), "capturing");
        enqueue();
        check(cudaStreamEndCapture(stream_.handle, &graph), "capturing");
        cudaError_t const made = cudaGraphInstantiate(&graph_, graph, 0);
        cudaGraphDestroy(graph);
        check(made, "making the graph");
    }

    std::string path_;
    Log log_;
    Stream stream_;
    DeviceMemory images_ = on_device(kInputBytes), answers_ = on_device(kOutputBytes);
    HostMemory host_images_ = on_host(kInputBytes), host_answers_ = on_host(kOutputBytes);
    std::unique_ptr<nvinfer1::IRuntime> runtime_;  // goes after the engine, which goes after the context
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::unique_ptr<nvinfer1::IExecutionContext> context_;
    cudaGraphExec_t graph_ = nullptr;
};

void show(std::string const& path, float const* output, std::vector<std::string> const& labels) {
    std::printf("%s\n", path.c_str());
    if (!model::kHasClasses) {
        std::printf("  embedding of %d numbers, the first is %.4f\n", model::kOutputs, static_cast<double>(output[0]));
        return;
    }
    std::vector<int> order(model::kOutputs);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return output[a] > output[b]; });
    auto const power = [&](int i) { return std::exp(static_cast<double>(output[i]) - output[order[0]]); };
    double sum = 0.0;
    for (int const i : order) sum += power(i);
    for (int i = 0; i < std::min(5, model::kOutputs); ++i) {
        std::size_t const best = static_cast<std::size_t>(order[i]);
        std::string const name = best < labels.size() ? labels[best] : "class " + std::to_string(best);
        std::printf("  %5.1f %%  %s\n", 100.0 * power(order[i]) / sum, name.c_str());
    }
}

std::vector<std::string> read_lines(std::string const& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error(path + ": cannot be opened");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
}

void classify(std::vector<std::string> const& given, std::string const& labels_path, bool with_graph) {
    auto const labels = labels_path.empty() ? std::vector<std::string>{} : read_lines(labels_path);
    std::vector<std::string> const paths(given.begin() + 1, given.end());
    Engine engine(given.front(), with_graph);
    for (std::size_t begin = 0; begin < paths.size(); begin += model::kBatch) {
        int const count = static_cast<int>(std::min<std::size_t>(model::kBatch, paths.size() - begin));
        for (int i = 0; i < model::kBatch; ++i) {  // the last batch is filled up with its last image
            auto const& path = paths[begin + static_cast<std::size_t>(std::min(i, count - 1))];
            engine.set_image(i, snapvit::placed(snapvit::read_ppm(path), model::kSteps));
        }
        float const* outputs = engine.run();
        for (int i = 0; i < count; ++i) show(paths[begin + i], outputs + i * model::kOutputs, labels);
    }
}

}  // namespace

int main(int count, char** arguments) {
    std::vector<std::string> given;
    std::string labels;
    bool with_graph = false;
    for (int i = 1; i < count; ++i) {
        std::string const word = arguments[i];
        if (word == "--graph") {
            with_graph = true;
        } else if (word == "--labels" && i + 1 < count) {
            labels = arguments[++i];
        } else {
            given.push_back(word);
        }
    }
    if (given.size() < 2) {
        std::cerr << "use: " << arguments[0] << " ENGINE image.ppm [more.ppm ...] [--labels labels.txt] [--graph]\n";
        return 2;
    }
    try {
        classify(given, labels, with_graph);
    } catch (std::exception const& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 1;
    }
    return 0;
}
