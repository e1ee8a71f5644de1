// `train_gpt tokenize`: text files to token shards.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct TokenizeOptions {
    std::vector<std::string> inputs;
    std::string out;                       // PREFIX of PREFIX_train_000.bin, PREFIX_val_000.bin, PREFIX_tokenizer.json
    std::string tokenizer = "bytes";       // "bytes" or a tokenizer.json of single bytes
    double val_frac = 0.1;                 // the end of each file that goes to validation, in [0, 1)
    size_t shard_tokens = 100'000'000;
};

// Each input file is one document and starts with the end-of-text token, in each part that it has tokens in.
// Writes shards of at most shard_tokens tokens and the tokenizer, and prints what it wrote.
// Fails on a file that cannot be read and on parts that come out empty.
void tokenize(const TokenizeOptions& options);
