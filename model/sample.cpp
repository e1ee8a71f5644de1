// Sampling; see sample.h. Probabilities are never normalised: a draw is compared with running sums of
// exp((logit - largest) / temperature), in double, which neither overflow nor all vanish at any temperature.
#include "model/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/error.h"
#include "kernels/random.h"

void sample_check(const SampleConfig& config) {
    if (!std::isfinite(config.temperature) || config.temperature < 0)
        fail("--temperature %g: must be 0 (greedy) or a positive number", config.temperature);
    if (!(config.top_p > 0 && config.top_p <= 1))
        fail("--top-p %g: must be above 0 and at most 1", config.top_p);
}

int sample_token(const float* logits, size_t V, const SampleConfig& config, double u) {
    // A token with a logit of minus infinity is never drawn.
    constexpr float infinity = std::numeric_limits<float>::infinity();
    std::vector<int> ids;
    int best = -1;
    for (size_t i = 0; i < V; i++) {
        if (std::isnan(logits[i]))
            fail("sampling: the logit of token %zu is NaN: the weights are damaged", i);
        if (logits[i] == -infinity) continue;
        ids.push_back(static_cast<int>(i));
        if (best < 0 || logits[i] > logits[best]) best = ids.back();
    }
    if (best < 0) fail("sampling: every logit is minus infinity: the weights are damaged");
    const double largest = logits[best];
    if (config.temperature == 0 || largest == infinity) return best;

    const bool cut_k = config.top_k > 0 && config.top_k < ids.size();
    const bool cut_p = config.top_p < 1;
    const auto likelier = [&](int a, int b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    if (cut_k) {  // sorting what remains is cheap; sorting a whole vocabulary is not
        std::nth_element(ids.begin(), ids.begin() + static_cast<long>(config.top_k), ids.end(), likelier);
        ids.resize(config.top_k);
    }
    if (cut_k || cut_p) std::sort(ids.begin(), ids.end(), likelier);

    std::vector<double> sums;  // sums[i] = weight(0) + ... + weight(i)
    double total = 0;
    for (int id : ids) sums.push_back(total += std::exp((logits[id] - largest) / config.temperature));
    if (cut_p) {
        // Logits are fp32, so a probability is known to about 1e-6: a sum that close to p has reached it.
        const double enough = config.top_p * total * (1 - 1e-6);
        size_t kept = 0;
        while (sums[kept++] < enough) {
        }
        sums.resize(kept);
    }

    // The first token whose running sum passes u * total; at u = 1, the last token that adds anything.
    const double threshold = std::min(std::nextafter(sums.back(), 0.0), u * sums.back());
    return ids[static_cast<size_t>(std::upper_bound(sums.begin(), sums.end(), threshold) - sums.begin())];
}

template <typename Storage>
void generate(Gpt<Storage>& model, std::vector<int> prompt, size_t count, const SampleConfig& config,
              const std::function<bool(int)>& on_token, Stream* stream) {
    sample_check(config);
    if (prompt.empty()) fail("--prompt: at least one token is needed to start from");
    const size_t V = model.config.vocab_size;
    std::vector<float> logits(V);
    std::vector<int>& context = prompt;
    for (size_t i = 0; i < count; i++) {
        // The window slides: positions are learned, so all of it is computed again for each token.
        if (context.size() > model.T)
            context.erase(context.begin(), context.end() - static_cast<long>(model.T));
        gpt_logits(model, logits.data(), context.data(), 1, context.size(), context.size() - 1, 1, stream);
        const double u = random_uniform(config.seed, RandomStream::sampling, 0, i);
        context.push_back(sample_token(logits.data(), V, config, u));
        if (!on_token(context.back())) return;
    }
}

template void generate(Gpt<float>&, std::vector<int>, size_t, const SampleConfig&,
                       const std::function<bool(int)>&, Stream*);
template void generate(Gpt<bf16_t>&, std::vector<int>, size_t, const SampleConfig&,
                       const std::function<bool(int)>&, Stream*);
template void generate(Gpt<fp16_t>&, std::vector<int>, size_t, const SampleConfig&,
                       const std::function<bool(int)>&, Stream*);
