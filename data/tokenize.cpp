// `train_gpt tokenize`; what it promises stands in tokenize.h. Two passes over the inputs: the first reads
// sizes and decides the cuts, so that bad input is refused before anything is written; the second encodes
// pieces into shards, so that memory is bounded by a shard, whatever the size of the inputs.
#include "data/tokenize.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>

#include "data/files.h"
#include "data/token_files.h"
#include "data/tokenizer.h"
#include "kernels/error.h"

namespace {

// Bytes encoded at a time. A byte tokenizer has no context: pieces of any size give the same tokens.
constexpr size_t piece_bytes = size_t{1} << 20;

struct Document {
    std::string path;
    size_t bytes;
    size_t cut;  // where validation begins
};

// The tokens of one part, on their way into shards.
struct ShardWriter {
    std::string stem;  // PREFIX_train_ or PREFIX_val_
    size_t shard_tokens;
    int bytes_per_token;
    std::vector<uint32_t> buffer;
    std::vector<std::string> written;
};

// Validation gets the last val_frac of the bytes, rounded down, and at most three more: no UTF-8 character
// is cut in two.
size_t find_cut(std::string_view text, double val_frac) {
    const auto val_bytes = static_cast<size_t>(static_cast<double>(text.size()) * val_frac);
    size_t cut = text.size() - val_bytes;
    const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
    for (int step = 0; step < 3 && cut > 0 && cut < text.size() && continues(text[cut]); step++) cut--;
    return cut;
}

void flush(ShardWriter& writer) {
    if (writer.buffer.empty()) return;
    char number[24];
    snprintf(number, sizeof(number), "%03zu", writer.written.size());
    const std::string path = writer.stem + number + ".bin";
    token_file_write(path, writer.buffer, writer.bytes_per_token);
    printf("%s  %zu tokens\n", printable_line(path).c_str(), writer.buffer.size());
    writer.written.push_back(path);
    writer.buffer.clear();
}

void append(ShardWriter& writer, const std::vector<int>& tokens) {
    for (const int token : tokens) {
        writer.buffer.push_back(static_cast<uint32_t>(token));
        if (writer.buffer.size() == writer.shard_tokens) flush(writer);
    }
}

void append_text(ShardWriter& writer, const Tokenizer& tokenizer, std::string_view text) {
    if (text.empty()) return;
    append(writer, {tokenizer.end_of_text});
    for (size_t first = 0; first < text.size(); first += piece_bytes) {
        append(writer, encode(tokenizer, text.substr(first, piece_bytes)));
    }
}

// Is it PREFIX_train_ or PREFIX_val_, digits, .bin?
bool is_shard_name(std::string_view name, std::string_view base) {
    constexpr std::string_view end = ".bin";
    if (!name.starts_with(base) || !name.ends_with(end)) return false;
    if (name.size() < base.size() + 3 + end.size()) return false;
    const std::string_view number = name.substr(base.size(), name.size() - base.size() - end.size());
    return number.find_first_not_of("0123456789") == std::string_view::npos;
}

// Removes the shards with this stem that this run did not write: an earlier run made more of them.
void remove_leftovers(const ShardWriter& writer) {
    namespace fs = std::filesystem;
    const fs::path stem = writer.stem;
    // Compared by name alone: one folder can be spelled in many ways.
    std::set<std::string> written, leftovers;
    for (const std::string& path : writer.written) written.insert(fs::path(path).filename());
    std::error_code error;
    for (const auto& entry :
         fs::directory_iterator(stem.has_parent_path() ? stem.parent_path() : ".", error)) {
        const std::string name = entry.path().filename();
        if (is_shard_name(name, stem.filename().string()) && !written.contains(name)) leftovers.insert(name);
    }
    if (error) fail("%s: cannot look for leftovers: %s", writer.stem.c_str(), error.message().c_str());
    for (const std::string& name : leftovers) {
        const std::string path = stem.parent_path() / name;
        if (!fs::remove(path, error)) {
            fail("%s: left over from an earlier run, cannot be removed: %s", path.c_str(),
                 error.message().c_str());
        }
        printf("%s  removed: left over from an earlier run\n", printable_line(path).c_str());
    }
}

}  // namespace

void tokenize(const TokenizeOptions& options) {
    if (options.inputs.empty()) fail("--input: no file given");
    if (options.out.empty() || options.out.ends_with('/')) {
        fail("--out \"%s\": must be the beginning of file names, such as data/books", options.out.c_str());
    }
    if (!(options.val_frac >= 0 && options.val_frac < 1)) {
        fail("--val-frac %g: must be at least 0 and less than 1", options.val_frac);
    }
    if (options.shard_tokens == 0 || options.shard_tokens > INT32_MAX) {
        fail("--shard-tokens %zu: must be 1 to %d", options.shard_tokens, INT32_MAX);
    }
    const std::string& name = options.tokenizer;
    std::error_code ignored;
    if (name != "bytes" && !std::filesystem::exists(name, ignored)) {
        fail("--tokenizer %s: neither \"bytes\" nor a file", name.c_str());
    }
    const Tokenizer tokenizer = name == "bytes" ? byte_tokenizer() : tokenizer_read(name, "--tokenizer");
    if (!tokenizer.obstacle.empty()) {
        fail("--tokenizer %s: %s; only byte tokenizers encode", name.c_str(), tokenizer.obstacle.c_str());
    }
    if (tokenizer.end_of_text < 0) fail("--tokenizer %s: has no <|endoftext|>", name.c_str());

    std::vector<Document> documents;
    size_t train_bytes = 0, val_bytes = 0;
    for (const std::string& path : options.inputs) {
        const MappedFile file = file_map(path, "--input");
        const size_t cut = find_cut(file.text(), options.val_frac);
        documents.push_back({path, file.bytes, cut});
        train_bytes += cut;
        val_bytes += file.bytes - cut;
    }
    if (train_bytes == 0) {
        fail("--input %s: %zu bytes in %zu files leave no text to train on", options.inputs[0].c_str(),
             val_bytes, documents.size());
    }
    if (options.val_frac > 0 && val_bytes == 0) {
        fail("--val-frac %g: %zu bytes of input leave no text for validation; give more text, or 0 for none",
             options.val_frac, train_bytes);
    }

    const int bytes_per_token = tokenizer.vocab_size() > 65536 ? 4 : 2;
    ShardWriter train = {options.out + "_train_", options.shard_tokens, bytes_per_token, {}, {}};
    ShardWriter val = {options.out + "_val_", options.shard_tokens, bytes_per_token, {}, {}};
    for (const Document& document : documents) {
        const MappedFile file = file_map(document.path, "--input");
        if (file.bytes != document.bytes) fail("--input %s: changed meanwhile", document.path.c_str());
        if (file.bytes == 0) printf("%s  passed over: empty\n", printable_line(document.path).c_str());
        append_text(train, tokenizer, file.text().substr(0, document.cut));
        append_text(val, tokenizer, file.text().substr(document.cut));
    }
    flush(train);
    flush(val);
    const std::string tokenizer_path = options.out + "_tokenizer.json";
    tokenizer_write(tokenizer_path, tokenizer);
    printf("%s  %zu ids\n", printable_line(tokenizer_path).c_str(), tokenizer.vocab_size());
    remove_leftovers(train);
    remove_leftovers(val);
}
