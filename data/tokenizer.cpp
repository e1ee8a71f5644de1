// Tokenizers in Hugging Face's tokenizer.json. A byte-level vocabulary writes its tokens in GPT-2's byte
// alphabet (Radford et al. 2019, `bytes_to_unicode`): a character that one can see for each of the 256 bytes.
#include "data/tokenizer.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "kernels/error.h"

namespace {

using nlohmann::json;

constexpr const char* end_of_text_name = "<|endoftext|>";

// Vocabularies have some 10^5 ids; a broken id must not make us allocate gigabytes.
constexpr int max_ids = 1 << 22;

// The code point that stands for each byte: the printable characters of Latin-1 stand for themselves, the
// other 68 bytes are numbered upwards from U+0100.
std::array<unsigned, 256> byte_alphabet() {
    std::array<unsigned, 256> alphabet;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; byte++) {
        const bool printed = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        alphabet[byte] = printed ? byte : next++;
    }
    return alphabet;
}

std::string to_alphabet(std::string_view bytes) {
    const auto alphabet = byte_alphabet();
    std::string text;
    for (const char c : bytes) {
        const unsigned code = alphabet[static_cast<unsigned char>(c)];
        if (code >= 0x80) text += static_cast<char>(0xC0 | code >> 6);  // all are below U+0800: two bytes
        text += static_cast<char>(code >= 0x80 ? 0x80 | (code & 0x3F) : code);
    }
    return text;
}

// Undoes to_alphabet; false if a character is not in the alphabet. The text is valid UTF-8.
bool from_alphabet(std::string& bytes, const std::string& text) {
    const auto alphabet = byte_alphabet();
    for (size_t i = 0; i < text.size(); i++) {
        unsigned code = static_cast<unsigned char>(text[i]);
        if (code >= 0xE0) return false;
        if (code >= 0x80) code = (code & 0x1F) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3F);
        const auto found = std::find(alphabet.begin(), alphabet.end(), code);
        if (found == alphabet.end()) return false;
        bytes += static_cast<char>(found - alphabet.begin());
    }
    return true;
}

// The id of each byte's own token, the lowest if there are several; -1 where there is none.
std::array<int, 256> byte_ids(const Tokenizer& tokenizer) {
    std::array<int, 256> ids;
    ids.fill(-1);
    for (size_t id = 0; id < tokenizer.bytes.size(); id++) {
        const std::string& bytes = tokenizer.bytes[id];
        if (bytes.size() != 1) continue;
        int& slot = ids[static_cast<unsigned char>(bytes[0])];
        if (slot < 0) slot = static_cast<int>(id);
    }
    return ids;
}

void set_token(Tokenizer& tokenizer, const json& id, const std::string& bytes, const std::string& path) {
    if (!id.is_number_integer() || id < 0 || id >= max_ids) {
        fail("%s: id %s is not a number from 0 to %d", path.c_str(), id.dump().c_str(), max_ids - 1);
    }
    const size_t i = id.get<size_t>();
    if (i >= tokenizer.bytes.size()) tokenizer.bytes.resize(i + 1);
    if (!tokenizer.bytes[i].empty() && tokenizer.bytes[i] != bytes) {
        fail("%s: two tokens have id %zu", path.c_str(), i);
    }
    tokenizer.bytes[i] = bytes;
}

// A member of an object, null where there is none.
json member(const json& object, const char* key) {
    return object.is_object() && object.contains(key) ? object[key] : json();
}

// Well-formed UTF-8 at the start of non-empty text (Unicode, table 3-7): the length of the sequence; 0 if
// there is none; -1 if the text ends inside one.
int utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    for (int i = 1; i < length; i++) {
        if (static_cast<size_t>(i) == text.size()) return -1;
        // The second byte's range keeps out overlong forms, surrogates and what lies above U+10FFFF.
        const unsigned char low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const unsigned char high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (byte(static_cast<size_t>(i)) < low || byte(static_cast<size_t>(i)) > high) return 0;
    }
    return length;
}

// U+0000-001F but newline and tab, U+007F, and U+0080-009F, which some terminals obey like ESC sequences.
bool is_control(std::string_view character) {
    const auto lead = static_cast<unsigned char>(character[0]);
    if (character.size() == 2) return lead == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
    return lead == 0x7F || (lead < 0x20 && lead != '\n' && lead != '\t');
}

}  // namespace

Tokenizer byte_tokenizer() {
    Tokenizer tokenizer;
    for (int byte = 0; byte < 256; byte++) tokenizer.bytes.emplace_back(1, static_cast<char>(byte));
    tokenizer.bytes.emplace_back(end_of_text_name);
    tokenizer.end_of_text = 256;
    tokenizer.obstacle = "";
    return tokenizer;
}

void tokenizer_write(const std::string& path, const Tokenizer& tokenizer) {
    if (!tokenizer.obstacle.empty()) {
        fail("%s: only a byte tokenizer can be written; this one %s", path.c_str(),
             tokenizer.obstacle.c_str());
    }
    nlohmann::ordered_json vocab = nlohmann::ordered_json::object();  // in the order of the ids
    for (size_t id = 0; id < tokenizer.bytes.size(); id++) {
        if (!tokenizer.bytes[id].empty()) vocab[to_alphabet(tokenizer.bytes[id])] = id;
    }
    json added = json::array();
    if (tokenizer.end_of_text >= 0) {
        added.push_back({{"id", tokenizer.end_of_text},
                         {"content", end_of_text_name},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", true}});
    }
    const json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
    const nlohmann::ordered_json root = {{"version", "1.0"},
                                         {"truncation", nullptr},
                                         {"padding", nullptr},
                                         {"added_tokens", added},
                                         {"normalizer", nullptr},
                                         {"pre_tokenizer", byte_level},
                                         {"post_processor", nullptr},
                                         {"decoder", byte_level},
                                         {"model",
                                          {{"type", "BPE"},
                                           {"dropout", nullptr},
                                           {"unk_token", nullptr},
                                           {"continuing_subword_prefix", nullptr},
                                           {"end_of_word_suffix", nullptr},
                                           {"fuse_unk", false},
                                           {"byte_fallback", false},
                                           {"vocab", vocab},
                                           {"merges", json::array()}}}};
    const std::string text = root.dump(1) + "\n";
    file_write(path, {text});
}

Tokenizer tokenizer_read(const std::string& path, const std::string& flag) {
    const MappedFile file = file_map(path, flag);
    const std::string source = flag.empty() ? path : flag + " " + path;
    const json root = json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
    if (!root.is_object()) fail("%s: is not a tokenizer.json: not a JSON object", source.c_str());
    const json model = member(root, "model"), vocab = member(model, "vocab"),
               merges = member(model, "merges");
    if (!vocab.is_object() || member(member(root, "decoder"), "type") != "ByteLevel") {
        fail("%s: is not a byte-level tokenizer.json: it needs model.vocab and a ByteLevel decoder",
             source.c_str());
    }
    if (vocab.empty()) fail("%s: its vocabulary is empty", source.c_str());

    Tokenizer tokenizer;
    bool single_bytes = true;
    for (const auto& [text, id] : vocab.items()) {
        std::string bytes;
        if (!from_alphabet(bytes, text)) {
            fail("%s: token %s is not in the byte-level alphabet", source.c_str(), json(text).dump().c_str());
        }
        set_token(tokenizer, id, bytes, source);
        single_bytes = single_bytes && (bytes.size() == 1 || bytes == end_of_text_name);
    }
    for (const json& added : member(root, "added_tokens")) {
        const json content = member(added, "content"), id = member(added, "id");
        if (!content.is_string()) fail("%s: an added token has no content", source.c_str());
        set_token(tokenizer, id, content.get<std::string>(), source);
        if (content == end_of_text_name) tokenizer.end_of_text = id.get<int>();
    }

    // Anything that changes the text first, or joins bytes, is more than a table of bytes.
    const json pre_tokenizer = member(root, "pre_tokenizer");
    const auto ids = byte_ids(tokenizer);
    if (!merges.is_null() && !merges.empty()) {
        tokenizer.obstacle = "has merges";
    } else if (!single_bytes) {
        tokenizer.obstacle = "has tokens of several bytes";
    } else if (std::find(ids.begin(), ids.end(), -1) != ids.end()) {
        tokenizer.obstacle = "has no token for some bytes";
    } else if (!member(root, "normalizer").is_null()) {
        tokenizer.obstacle = "has a normalizer";
    } else if (member(pre_tokenizer, "type") != "ByteLevel" ||
               member(pre_tokenizer, "add_prefix_space") != false) {
        tokenizer.obstacle = "has another pre_tokenizer than ByteLevel without a prefix space";
    } else {
        tokenizer.obstacle = "";
    }
    return tokenizer;
}

std::vector<int> encode(const Tokenizer& tokenizer, std::string_view text) {
    if (!tokenizer.obstacle.empty()) {
        fail("this vocabulary of %zu ids %s: this program encodes text with byte tokenizers only",
             tokenizer.vocab_size(), tokenizer.obstacle.c_str());
    }
    const auto ids = byte_ids(tokenizer);
    std::vector<int> tokens(text.size());
    for (size_t i = 0; i < text.size(); i++) tokens[i] = ids[static_cast<unsigned char>(text[i])];
    return tokens;
}

std::string decode(const Tokenizer& tokenizer, const std::vector<int>& ids) {
    std::string text;
    for (const int id : ids) {
        const bool known = id >= 0 && static_cast<size_t>(id) < tokenizer.bytes.size();
        const std::string bytes = known ? tokenizer.bytes[static_cast<size_t>(id)] : "";
        text += bytes.empty() ? "[" + std::to_string(id) + "]" : bytes;
    }
    return text;
}

std::string printable(std::string_view bytes, std::string& pending) {
    const std::string text = pending.append(bytes);
    pending.clear();
    std::string shown;
    for (std::string_view rest = text; !rest.empty();) {
        const int length = utf8_length(rest);
        if (length < 0) {
            pending = rest;
            break;
        }
        const std::string_view character = rest.substr(0, static_cast<size_t>(std::max(length, 1)));
        shown += length == 0 || is_control(character) ? "\uFFFD" : character;
        rest.remove_prefix(character.size());
    }
    return shown;
}

std::string printable_line(std::string_view bytes) {
    std::string text(bytes), pending;
    std::replace_if(
        text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; }, '\0');
    text = printable(text, pending);
    return pending.empty() ? text : text + "\uFFFD";
}
