// The tree over leaves and ranks, and the exchange of gradients and weights; see data_parallel.h.
#include "dist/data_parallel.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "kernels/error.h"
#include "kernels/kernels.h"
#include "kernels/tree.h"
#include "optim/grad_clip.h"

void data_parallel_check(size_t leaves, int ranks) {
    const auto R = static_cast<size_t>(ranks);
    if (leaves < 1 || leaves > tree_max_parts)
        fail("--virtual-ranks %zu: must be 1 to %u", leaves, tree_max_parts);
    if (R > tree_max_parts) fail("%d ranks: at most %u", ranks, tree_max_parts);
    if (R == 1 || (leaves % R == 0 && std::has_single_bit(leaves / R))) return;
    fail(
        "--virtual-ranks %zu on %d ranks: each rank must play the same power of two of them, so that what it "
        "adds by itself is a part of the one order of additions; %zu, %zu and %zu would do",
        leaves, ranks, R, 2 * R, 4 * R);
}

// ---------------------------------------------------------------------------------------------------
// The plan

namespace {

// The blocks of a stage, each with its owner.
std::vector<BlockPlace> blocks_of(const ParameterTable& table, const ParameterRange& stage,
                                  const Ownership& ownership) {
    std::vector<BlockPlace> blocks;
    const Parameter* first = &table[stage.first_parameter];
    const Parameter* end = table.data() + stage.end_parameter;
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        if (&parameter < first || &parameter >= end) return;
        blocks.push_back({parameter.offset + block.first_row * parameter.cols, block.rows * parameter.cols,
                          ownership.owner[number], 0});
    });
    return blocks;
}

size_t elements_of(const std::vector<BlockPlace>& blocks) {
    size_t elements = 0;
    for (const BlockPlace& block : blocks) elements += aligned_elements(block.elements);
    return elements;
}

// Chunks of at most `room` elements for each owner, a multiple of 64: a block may be cut, for sums of
// elements do not know where their block ends.
std::vector<Chunk> cut_into_chunks(const std::vector<BlockPlace>& blocks, int ranks, size_t room) {
    std::vector<Chunk> chunks;
    std::vector<size_t> filled(static_cast<size_t>(ranks));  // by each owner, over all chunks
    for (BlockPlace block : blocks) {
        size_t& place = filled[static_cast<size_t>(block.owner)];
        for (size_t left = block.elements; left > 0;) {
            const size_t number = place / room;
            if (number == chunks.size()) chunks.push_back({{}, std::vector<size_t>(filled.size())});
            block.staged = place % room;
            block.elements = std::min(left, room - block.staged);
            chunks[number].blocks.push_back(block);
            chunks[number].staged[static_cast<size_t>(block.owner)] =
                block.staged + aligned_elements(block.elements);
            block.offset += block.elements;
            left -= block.elements;
            place += aligned_elements(block.elements);
        }
    }
    return chunks;
}

// Neighbours of one owner as one block, the gap between them included.
std::vector<BlockPlace> merge_neighbours(const std::vector<BlockPlace>& blocks) {
    std::vector<BlockPlace> merged;
    for (const BlockPlace& block : blocks) {
        if (!merged.empty()) {
            BlockPlace& last = merged.back();
            const bool adjacent = aligned_elements(last.offset + last.elements) == block.offset ||
                                  last.offset + last.elements == block.offset;
            if (adjacent && last.owner == block.owner) {
                last.elements = block.offset + block.elements - last.offset;
                continue;
            }
        }
        merged.push_back(block);
    }
    return merged;
}

}  // namespace

int subtree_ranks(const std::vector<int>& nodes) {
    const auto ranks = static_cast<int>(nodes.size());
    const auto first = static_cast<int>(std::count(nodes.begin(), nodes.end(), nodes[0]));
    if (first == ranks || !std::has_single_bit(static_cast<unsigned>(first)) || ranks % first != 0)
        return ranks;
    for (int rank = 0; rank < ranks; rank++) {
        // Neighbours on a node, and every node as large as the first.
        const int leader = rank / first * first;
        const auto same = std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(rank)]);
        if (nodes[static_cast<size_t>(rank)] != nodes[static_cast<size_t>(leader)] || same != first)
            return ranks;
    }
    return first;
}

namespace {

// The elements of a chunk that a group adds up for the owners at place `place` of all groups.
size_t staged_at(const Chunk& chunk, int group, int place) {
    size_t elements = 0;
    for (size_t owner = static_cast<size_t>(place); owner < chunk.staged.size();
         owner += static_cast<size_t>(group))
        elements += chunk.staged[owner];
    return elements;
}

}  // namespace

ExchangePlan exchange_plan(const ParameterTable& table, const std::vector<ParameterRange>& stages,
                           const Ownership& ownership, int ranks, int group,
                           const DataParallelConfig& config) {
    ExchangePlan plan;
    plan.ranks = ranks;
    plan.group = group;
    // A sum of leaves is fp32, on the wire too; a leaf has been rounded.
    const bool leaf_travels = config.leaves == static_cast<size_t>(ranks);
    plan.wire_bytes = leaf_travels ? dtype_size(config.reduce_dtype) : sizeof(float);
    const size_t layer = elements_of(blocks_of(table, stages[1], ownership));
    const size_t room = aligned_elements(layer / static_cast<size_t>(ranks) + 1);
    const int place = ownership.rank % group;
    for (const ParameterRange& stage : stages) {
        const std::vector<BlockPlace> blocks = blocks_of(table, stage, ownership);
        plan.stages.push_back(cut_into_chunks(blocks, ranks, room));
        plan.weights.push_back(merge_neighbours(blocks));
        for (const Chunk& chunk : plan.stages.back()) {
            const size_t all = std::accumulate(chunk.staged.begin(), chunk.staged.end(), size_t{0});
            const size_t here = staged_at(chunk, group, place);
            plan.outgoing = std::max(plan.outgoing, all - here);
            plan.incoming = std::max(plan.incoming, here * static_cast<size_t>(group));
            if (group == ranks) continue;
            const size_t own = chunk.staged[static_cast<size_t>(ownership.rank)];
            plan.sums = std::max(plan.sums, here);
            plan.incoming_sums = std::max(plan.incoming_sums, own * static_cast<size_t>(ranks / group));
        }
    }
    return plan;
}

StepBytes step_bytes(const ExchangePlan& plan, int rank, size_t weight_bytes) {
    const int place = rank % plan.group;
    const auto groups = static_cast<size_t>(plan.ranks / plan.group), group = static_cast<size_t>(plan.group);
    StepBytes bytes;
    for (const std::vector<Chunk>& stage : plan.stages) {
        for (const Chunk& chunk : stage) {
            for (int peer = 0; peer < plan.group; peer++) {
                if (peer != place)
                    bytes.gradients_within += staged_at(chunk, plan.group, peer) * plan.wire_bytes;
            }
            const size_t others =
                staged_at(chunk, plan.group, place) - chunk.staged[static_cast<size_t>(rank)];
            bytes.gradients_between += others * sizeof(float);
        }
    }
    for (const std::vector<BlockPlace>& stage : plan.weights) {
        for (const BlockPlace& block : stage) {
            const size_t size = block.elements * weight_bytes;
            if (block.owner == rank) bytes.weights_between += size * (groups - 1);
            if (block.owner % plan.group == place) bytes.weights_within += size * (group - 1);
        }
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------
// Memory and streams

DataParallel data_parallel_create(Comm* comm, const ParameterTable& table,
                                  const std::vector<ParameterRange>& stages, const Ownership& ownership,
                                  const DataParallelConfig& config, const DeviceConfig& device,
                                  Stream* stream) {
    const int ranks = comm_ranks(comm);
    data_parallel_check(config.leaves, ranks);
    DataParallel dp;
    dp.comm = comm;
    dp.rank = comm_rank(comm);
    dp.config = config;
    dp.table = &table;
    dp.stages = stages;
    dp.elements = table_elements(table);
    dp.own_leaves = config.leaves / static_cast<size_t>(ranks);
    dp.first_leaf = dp.own_leaves * static_cast<size_t>(dp.rank);
    dp.compute = stream;

    dp.kept.resize(static_cast<size_t>(std::bit_width(dp.own_leaves - 1)));
    for (float*& sums : dp.kept) {
        sums = static_cast<float*>(device_malloc(dp.elements * sizeof(float), stream));
        dp.kept_bytes += dp.elements * sizeof(float);
    }
    if (config.leaf_squares) {
        const size_t bytes = dp.own_leaves * table_blocks(table) * sizeof(double);
        dp.leaf_squares = static_cast<double*>(device_malloc(bytes, stream));
    }
    if (ranks == 1) {
        dp.transfers = stream;
        return dp;
    }
    dp.plan = exchange_plan(table, stages, ownership, ranks, subtree_ranks(comm_nodes(comm)), config);
    const auto staging = [&](size_t bytes) {
        void* memory = device_malloc(bytes, stream);
        device_memset_zero(memory, bytes, stream);  // the gaps between blocks travel too
        dp.staging_bytes += bytes;
        return memory;
    };
    dp.outgoing = staging(dp.plan.outgoing * dp.plan.wire_bytes);
    dp.incoming = staging(dp.plan.incoming * dp.plan.wire_bytes);
    dp.sums = static_cast<float*>(staging(dp.plan.sums * sizeof(float)));
    dp.incoming_sums = static_cast<float*>(staging(dp.plan.incoming_sums * sizeof(float)));
    dp.transfers = config.overlap ? stream_create(device) : stream;
    dp.ready = event_create();
    dp.reduced = event_create();
    for (size_t s = 0; s < stages.size(); s++) {
        dp.gathered.push_back(event_create());
        event_record(dp.gathered.back(), dp.transfers);
    }
    stream_synchronize(stream);
    return dp;
}

void data_parallel_destroy(DataParallel& dp) {
    for (float* sums : dp.kept) device_free(sums, dp.compute);
    device_free(dp.leaf_squares, dp.compute);
    for (void* memory :
         {dp.outgoing, dp.incoming, static_cast<void*>(dp.sums), static_cast<void*>(dp.incoming_sums)})
        device_free(memory, dp.compute);
    if (dp.transfers != dp.compute) stream_destroy(dp.transfers);
    event_destroy(dp.ready);
    event_destroy(dp.reduced);
    for (Event* event : dp.gathered) event_destroy(event);
    dp = {};
}

// ---------------------------------------------------------------------------------------------------
// Gradients

namespace {

void round_leaf(const DataParallel& dp, float* grads, size_t elements, Stream* stream) {
    if (dp.config.reduce_dtype == Dtype::bf16) round_through<bf16_t>(grads, elements, stream);
}

// Queues the squares of a leaf's blocks in a range of parameters, whose gradients are complete.
void square_leaf(const DataParallel& dp, size_t leaf, const ParameterRange& range, const float* grads) {
    if (dp.leaf_squares == nullptr) return;
    double* squares = dp.leaf_squares + leaf * table_blocks(*dp.table);
    const Parameter* first = dp.table->data() + range.first_parameter;
    const Parameter* end = dp.table->data() + range.end_parameter;
    for_blocks(*dp.table, [&](const Parameter& parameter, const Block& block, size_t number) {
        if (&parameter >= first && &parameter < end)
            block_square(squares + number, grads, parameter, block, dp.compute);
    });
}

// Where a chunk's blocks are staged that this rank's group adds up for all groups' owners at one place: owner
// by owner. Returns the elements of that place.
size_t place_owners(const ExchangePlan& plan, const Chunk& chunk, int place, size_t start,
                    std::vector<size_t>& first) {
    size_t next = start;
    for (int owner = place; owner < plan.ranks; owner += plan.group) {
        first[static_cast<size_t>(owner)] = next;
        next += chunk.staged[static_cast<size_t>(owner)];
    }
    return next - start;
}

// Sends a chunk's blocks to the ranks of this group that add them up, and adds up this rank's: into `sums`,
// at first[owner] + staged, or where there is one group into the gradients, since they are its own.
template <typename Wire>
void add_within_group(DataParallel& dp, const Chunk& chunk, float* grads) {
    const ExchangePlan& plan = dp.plan;
    const int place = dp.rank % plan.group, leader = dp.rank - place;
    Wire *outgoing = static_cast<Wire*>(dp.outgoing), *incoming = static_cast<Wire*>(dp.incoming);
    std::vector<size_t> first(static_cast<size_t>(plan.ranks));  // of each owner's blocks, in their staging
    const size_t here = place_owners(plan, chunk, place, 0, first);
    std::vector<Transfer> sends, receives;
    size_t next = 0;
    for (int peer = 0; peer < plan.group; peer++) {
        if (peer == place) continue;
        const size_t there = place_owners(plan, chunk, peer, next, first);
        if (there > 0) sends.push_back({leader + peer, outgoing + next, there * sizeof(Wire)});
        if (here > 0) {
            Wire* part = incoming + static_cast<size_t>(peer) * here;
            receives.push_back({leader + peer, part, here * sizeof(Wire)});
        }
        next += there;
    }
    Wire* own_part = incoming + static_cast<size_t>(place) * here;
    for (const BlockPlace& block : chunk.blocks) {
        Wire* to = block.owner % plan.group == place ? own_part : outgoing;
        cast(to + first[static_cast<size_t>(block.owner)] + block.staged, grads + block.offset,
             block.elements, dp.transfers);
    }
    comm_exchange(dp.comm, Traffic::gradients, sends, receives, dp.transfers);
    for (const BlockPlace& block : chunk.blocks) {
        if (block.owner % plan.group != place) continue;
        const size_t at = first[static_cast<size_t>(block.owner)] + block.staged;
        float* sum = plan.group == plan.ranks ? grads + block.offset : dp.sums + at;
        tree_sum(sum, incoming + at, static_cast<size_t>(plan.group), here, block.elements, dp.transfers);
    }
}

// Sends the group's sums to the blocks' owners, and adds up the own blocks'.
void add_between_groups(DataParallel& dp, const Chunk& chunk, float* grads) {
    const ExchangePlan& plan = dp.plan;
    const int place = dp.rank % plan.group;
    const size_t own = chunk.staged[static_cast<size_t>(dp.rank)];
    std::vector<size_t> first(static_cast<size_t>(plan.ranks));
    place_owners(plan, chunk, place, 0, first);
    std::vector<Transfer> sends, receives;
    for (int owner = place, group = 0; owner < plan.ranks; owner += plan.group, group++) {
        float* part = dp.incoming_sums + static_cast<size_t>(group) * own;
        float* sum = dp.sums + first[static_cast<size_t>(owner)];
        const size_t there = chunk.staged[static_cast<size_t>(owner)];
        if (owner == dp.rank) {
            copy_on_device(part, sum, own * sizeof(float), dp.transfers);
            continue;
        }
        if (there > 0) sends.push_back({owner, sum, there * sizeof(float)});
        if (own > 0) receives.push_back({owner, part, own * sizeof(float)});
    }
    comm_exchange(dp.comm, Traffic::gradients, sends, receives, dp.transfers);
    for (const BlockPlace& block : chunk.blocks) {
        if (block.owner != dp.rank) continue;
        tree_sum(grads + block.offset, dp.incoming_sums + block.staged,
                 static_cast<size_t>(plan.ranks / plan.group), own, block.elements, dp.transfers);
    }
}

}  // namespace

void keep_leaf(DataParallel& dp, size_t leaf, float* grads) {
    square_leaf(dp, leaf, {0, dp.table->size()}, grads);
    round_leaf(dp, grads, dp.elements, dp.compute);
    size_t level = 0;
    for (; leaf >> level & 1; level++) add(grads, dp.kept[level], grads, dp.elements, dp.compute);
    copy_on_device(dp.kept[level], grads, dp.elements * sizeof(float), dp.compute);
}

void reduce_stage(DataParallel& dp, size_t stage, float* grads) {
    square_leaf(dp, dp.own_leaves - 1, dp.stages[stage], grads);
    if (dp.transfers != dp.compute) {
        event_record(dp.ready, dp.compute);
        stream_wait(dp.transfers, dp.ready);
    }
    const size_t first = (*dp.table)[dp.stages[stage].first_parameter].offset;
    const Parameter& last = (*dp.table)[dp.stages[stage].end_parameter - 1];
    const size_t elements = aligned_elements(last.offset + last.size()) - first;
    const size_t leaf = dp.own_leaves - 1;
    const bool leaf_travels = dp.plan.ranks > 1 && dp.own_leaves == 1;
    if (!leaf_travels) round_leaf(dp, grads + first, elements, dp.transfers);
    for (size_t level = 0; level < dp.kept.size(); level++) {
        if (leaf >> level & 1)
            add(grads + first, dp.kept[level] + first, grads + first, elements, dp.transfers);
    }
    if (dp.plan.ranks == 1) return;
    for (const Chunk& chunk : dp.plan.stages[stage]) {
        if (dp.plan.wire_bytes == sizeof(bf16_t)) {
            add_within_group<bf16_t>(dp, chunk, grads);
        } else {
            add_within_group<float>(dp, chunk, grads);
        }
        if (dp.plan.group < dp.plan.ranks) add_between_groups(dp, chunk, grads);
    }
}

void finish_reduction(DataParallel& dp) {
    if (dp.transfers == dp.compute) return;
    event_record(dp.reduced, dp.transfers);
    stream_wait(dp.compute, dp.reduced);
}

namespace {

// The parts lie one after the other in `values`: each block's sum over the parts.
std::vector<double> sum_parts(const std::vector<double>& values, size_t parts) {
    const size_t blocks = values.size() / parts;
    std::vector<double> sums(blocks);
    for (size_t block = 0; block < blocks; block++) {
        sums[block] = tree_fold<double>(static_cast<unsigned>(parts),
                                        [&](unsigned part) { return values[part * blocks + block]; });
    }
    return sums;
}

}  // namespace

std::vector<double> own_leaf_squares(const DataParallel& dp) {
    std::vector<double> squares(dp.own_leaves * table_blocks(*dp.table));
    copy_to_host(squares.data(), dp.leaf_squares, squares.size() * sizeof(double), dp.compute);
    return sum_parts(squares, dp.own_leaves);
}

std::vector<double> sum_leaf_squares(const std::vector<double>& of_ranks, size_t ranks) {
    return sum_parts(of_ranks, ranks);
}

// ---------------------------------------------------------------------------------------------------
// Weights

namespace {

// Sends those of a stage's blocks that `mine` says, to each peer, and receives those that `theirs` says of
// it.
template <typename Storage, typename Mine, typename Theirs>
void exchange_weights(DataParallel& dp, size_t stage, Storage* params, const std::vector<int>& peers,
                      const Mine& mine, const Theirs& theirs) {
    std::vector<Transfer> sends, receives;
    for (const BlockPlace& block : dp.plan.weights[stage]) {
        const Transfer transfer = {0, params + block.offset, block.elements * sizeof(Storage)};
        for (const int peer : peers) {
            if (mine(block)) sends.push_back({peer, transfer.memory, transfer.bytes});
            if (theirs(block, peer)) receives.push_back({peer, transfer.memory, transfer.bytes});
        }
    }
    comm_exchange(dp.comm, Traffic::weights, sends, receives, dp.transfers);
}

}  // namespace

template <typename Storage>
void gather_weights(DataParallel& dp, Storage* params) {
    const int ranks = dp.plan.ranks, group = dp.plan.group;
    if (ranks == 1) return;
    if (dp.transfers != dp.compute) {
        event_record(dp.ready, dp.compute);
        stream_wait(dp.transfers, dp.ready);
    }
    // First to and from those who have this rank's place in the other groups, then within the group.
    const int place = dp.rank % group, leader = dp.rank - place;
    std::vector<int> across, within;
    for (int peer = place; peer < ranks; peer += group) {
        if (peer != dp.rank) across.push_back(peer);
    }
    for (int peer = leader; peer < leader + group; peer++) {
        if (peer != dp.rank) within.push_back(peer);
    }
    for (size_t stage = 0; stage < dp.stages.size(); stage++) {
        exchange_weights(
            dp, stage, params, across, [&](const BlockPlace& block) { return block.owner == dp.rank; },
            [](const BlockPlace& block, int peer) { return block.owner == peer; });
        exchange_weights(
            dp, stage, params, within, [&](const BlockPlace& block) { return block.owner % group == place; },
            [&](const BlockPlace& block, int peer) { return block.owner % group == peer % group; });
        event_record(dp.gathered[stage], dp.transfers);
    }
}

void await_weights(DataParallel& dp, size_t stage) {
    if (dp.transfers != dp.compute) stream_wait(dp.compute, dp.gathered[stage]);
}

void await_all_weights(DataParallel& dp) {
    // Stages are gathered in order: with the last, all are there.
    if (!dp.stages.empty()) await_weights(dp, dp.stages.size() - 1);
}

template void gather_weights(DataParallel&, float*);
template void gather_weights(DataParallel&, bf16_t*);
template void gather_weights(DataParallel&, fp16_t*);
