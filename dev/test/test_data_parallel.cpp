// Who owns what, what is sent, and the order of the sums, apart from any transport. That ranks really get the
// same bits is test_ranks's business.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "dist/data_parallel.h"
#include "dist/layout.h"
#include "model/gpt.h"
#include "kernels/error.h"
#include "kernels/tree.h"
#include "dev/test/buffers.h"

namespace {

GptConfig preset(const char* name) {
    GptConfig config;
    EXPECT_TRUE(gpt_preset(name, config));
    return config;
}

// What each rank owns of the table.
struct Share {
    size_t elements = 0, matrices = 0;
    double work = 0;
};

std::vector<Share> shares(const ParameterTable& table, OptimizerKind kind, int ranks) {
    const Ownership ownership = assign_owners(table, kind, ranks, 0);
    std::vector<Share> result(static_cast<size_t>(ranks));
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        Share& share = result[static_cast<size_t>(ownership.owner[number])];
        share.elements += block.rows * parameter.cols;
        if (parameter.group != ParameterGroup::muon) return;
        share.matrices++;
        const auto small = static_cast<double>(std::min(block.rows, parameter.cols));
        share.work += small * small * static_cast<double>(std::max(block.rows, parameter.cols));
    });
    return result;
}

// muon.md's claim of the shapes: 2 L wide and 4 L square matrices divide evenly.
TEST(Layout, Gpt2DividesEvenlyOver2And4And8) {
    for (const char* name : {"d12", "d24", "d36", "d48"}) {
        const ParameterTable table = gpt_parameter_table(preset(name));
        for (const int ranks : {2, 4, 8}) {
            SCOPED_TRACE(testing::Message() << name << " on " << ranks);
            const std::vector<Share> parts = shares(table, OptimizerKind::muon, ranks);
            size_t least = SIZE_MAX, most = 0;
            for (const Share& share : parts) {
                EXPECT_EQ(share.work, parts[0].work);
                EXPECT_EQ(share.matrices, parts[0].matrices);
                least = std::min(least, share.elements);
                most = std::max(most, share.elements);
            }
            // The embeddings' ranges are not all of one length.
            EXPECT_LT(static_cast<double>(most - least), 0.01 * static_cast<double>(most));
        }
    }
}

TEST(Layout, AnyNumberOfRanks) {
    GptConfig config{.layers = 2, .heads = 2, .channels = 32, .seq_len = 16, .vocab_size = 50};
    const ParameterTable table = gpt_parameter_table(config);
    for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
        for (const int ranks : {1, 2, 3, 5, 7, 64}) {
            std::vector<size_t> owned(table_blocks(table));
            for (int rank = 0; rank < ranks; ++rank) {
                const Ownership ownership = assign_owners(table, kind, ranks, rank);
                EXPECT_EQ(ownership.owner, assign_owners(table, kind, ranks, 0).owner);
                std::set<size_t> places;
                for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
                    if (!ownership.own(number)) return;
                    owned[number]++;
                    const size_t first = ownership.master_offset[number];
                    EXPECT_LE(first + block.rows * parameter.cols, ownership.master_elements);
                    EXPECT_TRUE(places.insert(first).second);
                });
            }
            EXPECT_EQ(owned, std::vector<size_t>(owned.size(), 1)) << "each block has one owner";
        }
    }
}

// The least of the ranks' work is within one matrix of the most: what longest-first promises.
TEST(Layout, UnevenNumbersAreBalanced) {
    const ParameterTable table = gpt_parameter_table(preset("d12"));
    for (const int ranks : {3, 5, 7, 16}) {
        const std::vector<Share> parts = shares(table, OptimizerKind::muon, ranks);
        const auto [least, most] = std::minmax_element(
            parts.begin(), parts.end(), [](const Share& a, const Share& b) { return a.work < b.work; });
        EXPECT_LE(most->work - least->work, 4 * 768.0 * 768 * 768) << ranks;
    }
}

// ---------------------------------------------------------------------------------------------------

ExchangePlan plan_of(const GptConfig& config, OptimizerKind kind, int ranks, int rank,
                     const DataParallelConfig& settings, int group = 0) {
    const ParameterTable table = gpt_parameter_table(config);
    return exchange_plan(table, gpt_stages(config), assign_owners(table, kind, ranks, rank), ranks,
                         group == 0 ? ranks : group, settings);
}

// 4 (P-1)/P N for two bytes a gradient and two a weight; fp32 gradients, which sums of leaves are, take 6.
TEST(Exchange, BytesOfAStep) {
    for (const char* name : {"d12", "d24", "d36", "d48"}) {
        const GptConfig config = preset(name);
        const ParameterTable table = gpt_parameter_table(config);
        size_t N = 0;  // padding of the vocabulary included
        for (const Parameter& parameter : table) N += parameter.size();
        for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
            for (const size_t ranks : {2, 4, 8}) {
                for (const size_t leaves : {ranks, 2 * ranks}) {
                    const double gradient_bytes = leaves == ranks ? 2 : 4;
                    uint64_t gradients = 0, weights = 0;
                    for (size_t rank = 0; rank < ranks; ++rank) {
                        const ExchangePlan plan =
                            plan_of(config, kind, static_cast<int>(ranks), static_cast<int>(rank),
                                    {.leaves = leaves, .reduce_dtype = Dtype::bf16});
                        const StepBytes bytes = step_bytes(plan, static_cast<int>(rank), 2);
                        gradients += bytes.gradients(), weights += bytes.weights();
                    }
                    const double all = static_cast<double>((ranks - 1) * N);
                    EXPECT_NEAR(static_cast<double>(gradients) / (gradient_bytes * all), 1, 1e-4)
                        << name << " " << ranks << " " << leaves;
                    EXPECT_NEAR(static_cast<double>(weights) / (2 * all), 1, 1e-4) << name << " " << ranks;
                }
            }
        }
    }
}

TEST(Exchange, NodesThatAreSubtreesAddFirst) {
    EXPECT_EQ(subtree_ranks({0}), 1);
    EXPECT_EQ(subtree_ranks({0, 0, 0, 0}), 4);
    EXPECT_EQ(subtree_ranks({0, 0, 1, 1}), 2);
    EXPECT_EQ(subtree_ranks({0, 1, 2}), 1);
    EXPECT_EQ(subtree_ranks({0, 0, 1, 1, 2, 2}), 2);
    // Not neighbours, not of one size, not a power of two.
    EXPECT_EQ(subtree_ranks({0, 1, 0, 1}), 4);
    EXPECT_EQ(subtree_ranks({0, 0, 1}), 3);
    EXPECT_EQ(subtree_ranks({0, 0, 1, 1, 1, 1}), 6);
    EXPECT_EQ(subtree_ranks({0, 0, 0, 1, 1, 1}), 6);
}

// Two nodes of 4: half of the gradients' fp32 sums leave each node, 4 bytes N / 2, instead of 4 ranks' leaves
// of 2 bytes, 8 N / 2; and each weight once instead of 4 times. In all, weights take the same bytes as
// before.
TEST(Exchange, LittleCrossesBetweenNodes) {
    const GptConfig config = preset("d12");
    const ParameterTable table = gpt_parameter_table(config);
    double N = 0;
    for (const Parameter& parameter : table) N += static_cast<double>(parameter.size());
    uint64_t gradients = 0, weights = 0, all_weights = 0;
    for (int rank = 0; rank < 8; ++rank) {
        const ExchangePlan plan =
            plan_of(config, OptimizerKind::muon, 8, rank, {.leaves = 8, .reduce_dtype = Dtype::bf16}, 4);
        const StepBytes bytes = step_bytes(plan, rank, 2);
        gradients += bytes.gradients_between, weights += bytes.weights_between;
        all_weights += bytes.weights();
    }
    EXPECT_NEAR(static_cast<double>(gradients) / (4 * N), 1, 1e-3);
    EXPECT_NEAR(static_cast<double>(weights) / (2 * N), 1, 1e-3);
    EXPECT_NEAR(static_cast<double>(all_weights) / (7 * 2 * N), 1, 1e-3);
}

TEST(Exchange, StagingIsOneLayer) {
    const GptConfig config = preset("d12");
    const ExchangePlan plan = plan_of(config, OptimizerKind::muon, 4, 1, {.leaves = 4});
    const size_t layer = 12 * config.channels * config.channels + 13 * config.channels;
    EXPECT_LE(plan.outgoing, layer + 4 * 128);
    EXPECT_LE(plan.incoming, layer + 4 * 128);
}

// Every number of every tensor is in one chunk of its stage and in one message of weights.
TEST(Exchange, EverythingIsSentOnce) {
    GptConfig config{.layers = 3, .heads = 2, .channels = 40, .seq_len = 24, .vocab_size = 20000};
    config.tied_head = false;
    const ParameterTable table = gpt_parameter_table(config);
    const std::vector<ParameterRange> stages = gpt_stages(config);
    size_t parameter = 0;
    for (const ParameterRange& stage : stages) {
        EXPECT_EQ(stage.first_parameter, parameter);
        parameter = stage.end_parameter;
    }
    EXPECT_EQ(parameter, table.size());
    for (const int ranks : {2, 3, 7}) {
        const ExchangePlan plan = plan_of(config, OptimizerKind::muon, ranks, 0, {.leaves = 7});
        std::vector<int> reduced(table_elements(table)), gathered(reduced.size());
        for (size_t s = 0; s < stages.size(); ++s) {
            for (const Chunk& chunk : plan.stages[s]) {
                for (const BlockPlace& block : chunk.blocks) {
                    for (size_t i = 0; i < block.elements; ++i) reduced[block.offset + i]++;
                }
            }
            for (const BlockPlace& block : plan.weights[s]) {
                for (size_t i = 0; i < block.elements; ++i) gathered[block.offset + i]++;
            }
        }
        for (const Parameter& p : table) {
            for (size_t i = p.offset; i < p.offset + p.size(); ++i) {
                ASSERT_EQ(reduced[i], 1) << p.name;
                ASSERT_EQ(gathered[i], 1) << p.name;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------

// A sum written as text, so that its order shows.
struct Text {
    std::string text;
};
Text operator+(const Text& a, const Text& b) { return {"(" + a.text + b.text + ")"}; }

TEST(Leaves, AreAddedInOneTree) {
    const std::vector<const char*> expected = {"0",
                                               "(01)",
                                               "((01)2)",
                                               "((01)(23))",
                                               "(((01)(23))4)",
                                               "(((01)(23))(45))",
                                               "(((01)(23))((45)6))",
                                               "(((01)(23))((45)(67)))"};
    for (unsigned count = 1; count <= expected.size(); ++count) {
        const Text sum = tree_fold<Text>(count, [](unsigned part) { return Text{std::to_string(part)}; });
        EXPECT_EQ(sum.text, expected[count - 1]);
    }
}

TEST(Leaves, TakeWholeSubtreesOrAreRefused) {
    for (const auto& [leaves, ranks] : std::vector<std::pair<size_t, int>>{
             {1, 1}, {2, 1}, {3, 1}, {7, 1}, {8, 8}, {8, 4}, {8, 2}, {3, 3}, {6, 3}, {12, 3}, {2047, 1}}) {
        EXPECT_NO_THROW(data_parallel_check(leaves, ranks)) << leaves << " on " << ranks;
    }
    for (const auto& [leaves, ranks] : std::vector<std::pair<size_t, int>>{
             {0, 1}, {1, 2}, {3, 2}, {6, 2}, {8, 3}, {4, 8}, {2048, 1}, {9, 3}}) {
        EXPECT_THROW(data_parallel_check(leaves, ranks), Error) << leaves << " on " << ranks;
    }
}

// The squares of the leaves' gradients against sums in double, and in the same tree whoever adds which
// leaves.
TEST(Leaves, SquaresOfTheirGradients) {
    const GptConfig config{.layers = 2, .heads = 1, .channels = 24, .seq_len = 8, .vocab_size = 70};
    const ParameterTable table = gpt_parameter_table(config);
    const std::vector<ParameterRange> stages = gpt_stages(config);
    const Ownership ownership = own_all(table);
    const StreamPointer stream = open_stream();
    Comm* comm = comm_connect({}, 1, nullptr);
    for (const size_t leaves : {2, 3, 8}) {
        DataParallel dp = data_parallel_create(comm, table, stages, ownership,
                                               {leaves, Dtype::bf16, true, true}, {}, stream.get());
        Buffer<float> grads(std::vector<float>(table_elements(table)), stream.get());
        std::vector<double> expected(table_blocks(table)), single;
        for (unsigned leaf = 0; leaf < leaves; ++leaf) {
            const std::vector<float> values = normal<float>(table_elements(table), leaf + 1);
            copy_to_device(grads, values.data(), values.size() * sizeof(float), stream.get());
            for_blocks(table, [&](const Parameter& p, const Block& block, size_t number) {
                double square = 0;
                for (size_t i = 0; i < block.rows * p.cols; ++i)
                    square +=
                        std::pow(static_cast<double>(values[p.offset + block.first_row * p.cols + i]), 2);
                expected[number] += square;
            });
            if (leaf + 1 < leaves) {
                keep_leaf(dp, leaf, grads);
            } else {
                for (size_t stage = stages.size(); stage-- > 0;) reduce_stage(dp, stage, grads);
            }
        }
        finish_reduction(dp);
        const std::vector<double> found = own_leaf_squares(dp);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i] / expected[i], 1, 1e-13) << i;
        data_parallel_destroy(dp);
    }
    comm_disconnect(comm);
}

TEST(Leaves, SquaresAreAddedInTheOneTree) {
    std::vector<double> squares(8, 1e-16);
    squares[0] = 1;
    const auto part = [&](size_t first, size_t count) {
        return sum_leaf_squares({squares.begin() + static_cast<std::ptrdiff_t>(first),
                                 squares.begin() + static_cast<std::ptrdiff_t>(first + count)},
                                count)[0];
    };
    const double all = part(0, 8);
    EXPECT_NE(all, std::accumulate(squares.begin(), squares.end(), 0.0)) << "these numbers show the order";
    for (const size_t ranks : {1, 2, 4, 8}) {
        std::vector<double> of_ranks;  // of two blocks each
        for (size_t rank = 0; rank < ranks; ++rank)
            of_ranks.insert(of_ranks.end(), {part(8 / ranks * rank, 8 / ranks), 1});
        EXPECT_EQ(sum_leaf_squares(of_ranks, ranks), (std::vector<double>{all, static_cast<double>(ranks)}));
    }
}

}  // namespace
