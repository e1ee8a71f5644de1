// Checkpoints: a folder OUT/step_00000100 that is a Hugging Face model folder, plus the optimizer's state
// with the fp32 master weights, and state.json. Written under a temporary name, every file synced, then
// renamed: what has the final name is complete. state.json, written last, holds the size and checksum of
// every other file, and its own.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/gpt.h"
#include "optim/optimizer.h"

// The ranks that save together. `barrier` returns when all of them have called it; a rank that fails ends the
// others.
struct CheckpointRanks {
    int rank = 0;
    std::function<void()> barrier = [] {};
};

// Saves OUT/step_%08d, creating OUT where it is missing and replacing a checkpoint of the same step. `state`
// is whatever the training loop must have back (options, data position, ...); tokenizer is a file to copy in
// as tokenizer.json, or ""; end_of_text is that tokenizer's id, or -1. First removes the leftovers of
// interrupted saves; afterwards all complete checkpoints up to this step but the newest `keep` (0 = keep
// all), so the disk must hold keep + 1. Fails with path and reason; then no incomplete folder has a final
// name, and nothing older is gone unless the new one is complete.
//
// All ranks of a run call it together: each writes the state of the blocks that it owns, and rank 0 the rest.
template <typename Storage>
void checkpoint_save(const std::string& out, uint64_t step, const Gpt<Storage>& model,
                     const Optimizer& optimizer, const nlohmann::json& state, const std::string& tokenizer,
                     int end_of_text, size_t keep, Stream* stream, const CheckpointRanks& ranks = {});

// OUT/step_%08d: where a checkpoint of that step is, or would be.
std::string checkpoint_folder(const std::string& out, uint64_t step);

struct FoundCheckpoint {
    std::string folder;  // "" if there is none
    uint64_t step = 0;
    std::vector<std::string> passed_over;  // "name: reason", newest first
};

// The newest checkpoint of OUT that verifies: its name is exact, state.json parses, and every file has the
// size and checksum written there. Changes nothing. Other names in OUT are ignored; a missing OUT has none.
FoundCheckpoint checkpoint_find(const std::string& out);

// state.json's "state" of a checkpoint folder. Fails where state.json is damaged.
nlohmann::json checkpoint_read_state(const std::string& folder);

// Loads weights, master weights and optimizer state, bit for bit; of the latter two this rank's part, however
// many ranks saved them. Fails if they do not fit the model or optimizer. Checksums are checkpoint_find's
// business.
template <typename Storage>
void checkpoint_load(const std::string& folder, Gpt<Storage>& model, Optimizer& optimizer, Stream* stream);
