// Checkpoints: a folder OUT/step_00000100 that is a Hugging Face model folder, plus the optimizer's state
// and state.json. Written under a temporary name, every file synced, then renamed: what has the final name
// is complete. state.json, written last, holds the checksum of every other file.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/gpt.h"
#include "optim/optimizer.h"

// Saves OUT/step_%08d. `state` is whatever the training loop must have back (options, data position, ...);
// tokenizer is a file to copy in as tokenizer.json, or "". Afterwards removes all but the newest `keep`
// complete checkpoints (0 = keep all) and leftovers of interrupted saves. Fails with path and reason; then
// no folder has the final name and older checkpoints are untouched.
template <typename Storage>
void checkpoint_save(const std::string& out, uint64_t step, const Gpt<Storage>& model, const Optimizer& optimizer,
                     const nlohmann::json& state, const std::string& tokenizer, int end_of_text, size_t keep,
                     Stream* stream);

struct FoundCheckpoint {
    std::string folder;                    // "" if there is none
    uint64_t step = 0;
    std::vector<std::string> passed_over;  // "name: reason", newest first
};

// The newest checkpoint of OUT that verifies: its name is exact, state.json parses, and every file has the
// size and checksum written there.
FoundCheckpoint checkpoint_find(const std::string& out);

// state.json's "state" of a checkpoint folder.
nlohmann::json checkpoint_read_state(const std::string& folder);

// Loads weights and optimizer state, bit for bit. Fails if they do not fit the model or optimizer.
template <typename Storage>
void checkpoint_load(const std::string& folder, Gpt<Storage>& model, Optimizer& optimizer, Stream* stream);
