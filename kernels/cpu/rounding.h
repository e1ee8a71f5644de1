// The random bits that an op rounds its averages with (StateRounding in kernels/kernels.h), a run of entries
// at a time: drawn in a loop of their own, they leave the op's loop simple enough to become vector code.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/kernels.h"
#include "kernels/random.h"

// Calls body(run_begin, run_end, word) for runs that make up [begin, end); word(i) is the word of entry i.
// Where State is float, [begin, end) is one run and nothing is drawn.
template <typename State, typename Body>
void for_rounding_runs(const StateRounding& rounding, size_t begin, size_t end, const Body& body) {
    if constexpr (std::is_same_v<State, float>) {
        body(begin, end, [](size_t) { return 0u; });
    } else {
        constexpr size_t longest = 256;
        uint32_t words[longest + 4];  // a run may start and end within four words of one counter
        for (; begin < end; begin += longest) {
            const size_t run_end = std::min(end, begin + longest);
            const size_t counter = (rounding.first + begin) / 4;
            const size_t counters = (rounding.first + run_end - 1) / 4 - counter + 1;
            for (size_t c = 0; c < counters; c++) {
                const auto bits =
                    random_bits(rounding.seed, RandomStream::rounding, rounding.step, counter + c);
                std::copy(bits.begin(), bits.end(), words + 4 * c);
            }
            const uint32_t* run_words = words + (rounding.first + begin) % 4;
            body(begin, run_end, [=](size_t i) { return run_words[i - begin]; });
        }
    }
}
