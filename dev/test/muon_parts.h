// Muon's parts one by one, for tests: of one block each, or of contiguous ones, through the ops that do
// several at once for many.
#pragma once

#include <type_traits>
#include <vector>

#include "kernels/kernels.h"

// Device memory while it is needed.
template <typename Element>
struct OnDevice {
    Element* data;
    Stream* stream;
    OnDevice(const std::vector<Element>& contents, Stream* stream_) : stream(stream_) {
        const size_t bytes = contents.size() * sizeof(Element);
        data = static_cast<Element*>(device_malloc(bytes, stream));
        copy_to_device(data, contents.data(), bytes, stream);
    }
    ~OnDevice() { device_free(data, stream); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    operator Element*() const { return data; }
};

// The direction and the momentum that muon_prologue forms of one block; numbers are MuonStep's.
template <typename State>
void muon_momentum(float* direction, State* momentum, const float* grad, size_t n, float mu, bool nesterov,
                   float grad_scale, const StateRounding& rounding, Stream* stream) {
    const OnDevice<MuonStep> step(
        {{.mu = mu, .grad_scale = grad_scale, .rounding_step = rounding.step, .skip = 0}}, stream);
    const OnDevice<MuonBlock> block({{momentum, rounding.first, 0, 0, 1}}, stream);
    const OnDevice<fp16_t> x(std::vector<fp16_t>(n), stream);
    const OnDevice<int> degenerate({0}, stream);
    // The block lies at entry `first` of an arena of which only it is there.
    muon_prologue<State, fp16_t>(x, degenerate, direction, grad - rounding.first, block, step, 1, n, nesterov,
                                 1, rounding.seed, stream);
}

// muon_prologue's normalisation of `batch` contiguous directions: of momentum that starts at 0, with a mu of
// 0. x may be direction.
template <typename Storage>
void muon_normalize(Storage* x, int* degenerate, const float* direction, size_t batch, size_t n, float safety,
                    Stream* stream) {
    const OnDevice<MuonStep> step({{.mu = 0, .grad_scale = 1, .rounding_step = 0, .skip = 0}}, stream);
    const OnDevice<float> momentum(std::vector<float>(batch * n), stream),
        copy(std::vector<float>(batch * n), stream);
    float* kept = copy;  // directions, kept from the first kernel to the second
    if constexpr (std::is_same_v<Storage, float>) {
        if (x == direction) {
            copy_on_device(copy, direction, batch * n * sizeof(float), stream);
            direction = copy;
            kept = x;
        }
    }
    std::vector<MuonBlock> places;
    for (size_t i = 0; i < batch; i++) places.push_back({momentum + i * n, i * n, 0, 0, 1});
    const OnDevice<MuonBlock> blocks(places, stream);
    muon_prologue<float>(x, degenerate, kept, direction, blocks, step, batch, n, false, safety, 0, stream);
}

// muon_epilogue of one block.
template <typename Storage, typename Update>
void muon_update(Storage* param, float* master, const Update* update, size_t n, float lr, float scale,
                 float weight_decay, bool cautious, Stream* stream) {
    const float decay = static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay);
    const OnDevice<MuonStep> step(
        {{.mu = 0, .grad_scale = 1, .rounding_step = 0, .skip = 0, .cautious = cautious}}, stream);
    const OnDevice<MuonBlock> block({{nullptr, 0, 0, lr, decay}}, stream);
    muon_epilogue(param, master, update, block, step, 1, n, scale, stream);
}
