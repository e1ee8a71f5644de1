// `train_gpt tokenize`: text files to token shards.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct TokenizeOptions {
    std::vector<std::string> inputs;
    std::string out;  // PREFIX of PREFIX_train_000.bin, PREFIX_val_000.bin, PREFIX_tokenizer.json
    std::string tokenizer = "bytes";  // "bytes" or a tokenizer.json of single bytes
    double val_frac = 0.1;            // the end of each file that goes to validation, in [0, 1)
    size_t shard_tokens = 100'000'000;
};

// Each input file is one document and starts with the end-of-text token, in each part that it has tokens in;
// a document longer than a shard goes on in the next one. The cut between the parts is at a byte, moved back
// where it would fall inside a UTF-8 character. "<|endoftext|>" in a file is text like any other.
//
// Writes shards of at most shard_tokens tokens, uint16 where the vocabulary has at most 65536 ids and uint32
// above, and the tokenizer, and prints a line for each. The files of PREFIX are one set: a run replaces it,
// so what an earlier run left under a higher shard number (or as validation, if there is none now) is
// removed in the end, with a line that says so; a pattern like PREFIX_train_*.bin would read it again.
//
// Fails, before it writes anything, on options out of range, a file that cannot be read, and a part that
// comes out empty; and then, with path and reason, if a file cannot be written. An empty file among others
// is passed over with a line.
void tokenize(const TokenizeOptions& options);
