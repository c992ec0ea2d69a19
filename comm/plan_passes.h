/*
The passes of a training step over memory: a row for each launch, with the bytes that it reads and writes,
each tensor as often as the kernel goes over it, and its FLOPs. Sizes of any model can be counted so, without
a device; on the simulated device a test compares the rows with what kernels really read and write.

The rows follow train_gpt.cu, from the embedding to the optimizer. Communication is not among them, and
neither are single numbers.
*/
#pragma once

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/activations.h"  // Workload
#include "comm/stage.h"        // Dims, Stage
#include "comm/zero_arrays.h"  // ZeroSettings
#include "data/options/model_config.h"
#include "data/run/meter.h"       // mean_keys
#include "kernels/embedding.cuh"  // sum_rows_launches
#include "kernels/ledger.h"       // ProductShape
#include "kernels/matmul.cuh"     // bias_slices
#include "kernels/muon.cuh"       // newton_schulz_steps
#include "kernels/norm.cuh"       // NormBackwardBlocks
#include "kernels/qk_norm.cuh"    // qk_norm_partials

// A pass belongs to one of these parts of a step, which the pipeline's actions put together.
enum class StepPart {
    embedding_forward,
    embedding_backward,
    block_forward,
    block_backward,  // recomputation included
    stream,          // for the next stage
    head_forward,    // the last norm
    head_backward,   // the classifier included, which makes both passes at once
    // the optimizer, over what this rank steps: the global norm, and gradients that are cleared; updates,
    // where they have a pass of their own; whole matrices, at their owners; and new weights
    gradient_norm,
    prepare,
    transform,
    optimizer
};

// Rows of activations that tensor ranks send at a pass (comm/tensor_parallel.h): all come together before it,
// or are summed and dealt out after it. A product of a block is made in pieces meanwhile. For the gradient of
// a weight they come together again, behind that of the weight before.
enum class RowsSent { none, gathered, scattered, regathered };

struct Pass {
    const char* launcher;  // the function of kernels/ that starts it; nullptr: a fill or copy by the driver
    double times;          // in a step
    double read, written;  // bytes, each time
    ProductShape product = {};
    double attention_flops = 0;  // scores that are computed and then masked do not count
    double mean_keys = 0;        // attention: seen by a query
    int launches = 1;            // kernels, each time
    StepPart part = StepPart::optimizer;
    int layer = -1;  // a block's layer
    RowsSent sent = RowsSent::none;
    bool for_weight = false;  // copies in fp8: for the gradient of a weight

    // Those that a zero-bubble pipeline leaves for later, where they are of a block.
    bool is_weight_gradient() const {
        std::string_view name = launcher ? launcher : "";
        return for_weight || name == "matmul_backward_weight" || name == "fp8_matmul_backward_weight";
    }
    double flops() const { return attention_flops > 0 ? attention_flops : product.flops(); }
};

// Parameters that an optimizer steps, those of the blocks' matrices among them. Which of them are matters to
// one that transforms matrices.
struct SteppedParameters {
    double all, matrices;
    SteppedParameters(double all, double matrices = 0) : all(all), matrices(matrices) {}
};

// Matrices that an optimizer of whole ones sees in a block.
inline int matrices_of_block(const ModelConfig& config) {
    int count = 0;
    for (const TensorRow& row : tensor_table(config))
        if (row.is_block_matrix()) count += (int)row.all_sections().size();
    return count;
}

// The passes of orthogonalise() on a matrix (kernels/muon.cuh), with rows <= cols.
inline std::vector<Pass> orthogonal_passes(double rows, double cols, double e) {
    double n = rows * cols, square = rows * rows;
    std::vector<Pass> passes;
    auto add = [&](const char* launcher, double times, double read, double written, ProductShape product = {},
                   int launches = 1) {
        passes.push_back({launcher, times, e * read, e * written, product, 0, 0, launches});
        passes.back().part = StepPart::transform;
    };
    constexpr double steps = newton_schulz_steps;
    add("sums_of_squares", 1, n, 0, {}, 2);
    add("divide_by_norm", 1, n, n);
    add("matmul_forward", steps, 2 * n, square, {rows, rows, cols});
    add("matmul_forward", steps, 2 * square, square, {rows, rows, rows});
    add("elementwise", steps, 2 * square, square);
    add("matmul_backward_input", steps, n + square, n, {rows, cols, rows});
    add("elementwise", steps, 2 * n, n);
    return passes;
}

// The passes of a training step on one rank.
class StepPasses {
public:
    std::vector<Pass> rows;

    // parameters: those that this rank's optimizer steps. It is the owner of all matrices of its layers.
    StepPasses(const ModelConfig& config, const Workload& workload, const Stage& stage, int micro_batches,
               SteppedParameters parameters, const ZeroSettings& settings)
        : c_(config),
          w_(workload),
          d_(config, stage.layout().mesh.tp, workload.B, workload.T),
          M_(micro_batches),
          N_(d_.N),
          n_(d_.n),
          C_(d_.C),
          in_place_(config, workload.recompute),
          vocab_((double)padded_vocab(config, stage.layout().mesh.tp)) {
        if (stage.has_embedding()) embedding();
        for (int chunk = 0; chunk < stage.chunks(); chunk++) {
            for (int layer = stage.first_layer(chunk); layer < stage.end_layer(chunk); layer++)
                block(layer, layer == stage.first_layer(chunk));
            if (chunk < stage.chunks() - 1 || !stage.has_head()) {
                add("elementwise", M_, 2 * e * n_ * C_, e * n_ * C_);  // the stream for the next part
                // passes over its gradient
                if (w_.fp8 && norm_measures()) add("find_amax", M_, e * n_ * C_, 0);
                if (c_.bias) bias_gradient("matmul_backward_bias", n_, C_);
            }
            mark(StepPart::stream);
        }
        if (stage.has_head()) head();
        if (w_.fp8) fp8_again(stage.layout().row_chunks > 1, std::ranges::max(stage.capacity.pending) > 0);
        int layers = 0;
        for (int of_chunk : stage.layers(0)) layers += of_chunk;
        optimizer(parameters, settings, (int)stage.units().units.size(), layers);
    }

private:
    const ModelConfig& c_;
    const Workload& w_;
    const double e = (double)w_.element_bytes;
    Dims d_;
    double M_, N_, n_, C_;
    RowsInPlace in_place_;
    double vocab_;
    size_t marked_ = 0;  // rows whose part is known

    bool sequential() const { return c_.block == BlockKind::sequential; }
    bool swiglu() const { return c_.mlp == MlpKind::swiglu; }
    bool gelu_fused() const { return gelu_is_fused(c_, w_, d_.F); }
    bool gelu_gradient_fused() const { return gelu_gradient_is_fused(c_, w_, d_.F); }
    int vectors() const {
        int width = 16 / (int)w_.element_bytes;
        return d_.C % width == 0 ? width : 1;
    }
    // Gradients that a norm has, of its weight and perhaps a bias; and bytes that it keeps of a row.
    bool layernorm() const { return c_.norm == NormKind::layernorm; }
    double sums_of_norm() const { return layernorm() && c_.bias ? 2 : 1; }
    double stats() const { return layernorm() ? 8 : 4; }

    void add(const char* launcher, double times, double read, double written, int launches = 1) {
        rows.push_back({launcher, times, read, written, {}, 0, 0, launches});
    }

    // Layers side by side send their rows once.
    RowsSent gathered_alone() const { return sequential() ? RowsSent::gathered : RowsSent::none; }
    RowsSent scattered_alone() const { return sequential() ? RowsSent::scattered : RowsSent::none; }

    // For the weight's gradient that was added last.
    void regather(bool in_place) {
        if (in_place) return;
        auto is_it = [](const Pass& pass) { return pass.is_weight_gradient() && pass.product.sums > 0; };
        std::find_if(rows.rbegin(), rows.rend(), is_it)->sent = RowsSent::regathered;
    }

    // The rows that were added since the last call.
    void mark(StepPart part, int layer = -1) {
        for (; marked_ < rows.size(); marked_++) rows[marked_].part = part, rows[marked_].layer = layer;
    }

    // ---- matrices: OC outputs of each of `tokens` rows of `inputs`

    Pass& forward(double tokens, double inputs, double OC, bool accumulate = false, bool gelu = false) {
        const char* launcher = gelu ? "matmul_gelu_forward" : "matmul_forward";
        double out = e * tokens * OC;
        rows.push_back({launcher, M_, e * (tokens * inputs + inputs * OC) + (accumulate ? out : 0),
                        (gelu ? 2 : 1) * out, ProductShape{tokens, OC, inputs}});
        return rows.back();
    }
    // Returns the pass for the input.
    Pass& backward(double tokens, double inputs, double OC, bool bias, bool accumulate = false,
                   bool gelu = false) {
        size_t first = rows.size();
        double dinp = e * tokens * inputs, dout = e * tokens * OC, dweight = 4 * inputs * OC;
        rows.push_back({gelu ? "matmul_backward_gelu" : "matmul_backward_input", M_,
                        dout + e * inputs * OC + (accumulate || gelu ? dinp : 0), dinp,
                        ProductShape{tokens, inputs, OC}});
        rows.push_back(
            {"matmul_backward_weight", M_, dout + dinp + dweight, dweight, ProductShape{OC, inputs, tokens}});
        if (bias) bias_gradient("matmul_backward_weight", tokens, OC);
        return rows[first];
    }

    // Those of the blocks, of all rows. measured: the kernel that made the input, or the gradient of the
    // output, has found the amax.
    Pass& linear_forward(double inputs, double OC, bool measured, bool accumulate = false,
                         bool gelu = false) {
        if (!w_.fp8) return forward(N_, inputs, OC, accumulate, gelu);
        quantize(inputs, measured, 2);
        weight_copy(inputs * OC);
        double out = e * N_ * OC;
        rows.push_back({"fp8_matmul_forward", M_, N_ * inputs + inputs * OC + (accumulate ? out : 0), out,
                        ProductShape{N_, OC, inputs, true, true}});
        return rows.back();
    }
    Pass& linear_backward(double inputs, double OC, bool measured, bool bias, bool accumulate = false,
                          bool gelu = false) {
        if (!w_.fp8) return backward(N_, inputs, OC, bias, accumulate, gelu);
        double dinp = e * N_ * inputs, weight = inputs * OC, dweight = 4 * weight;
        add("find_amax", 1, e * weight, 0);
        if (keeps_weights()) add("fp8_quantize", 1, e * weight, 2 * weight);
        quantize(OC, measured, 2);
        weight_copy(weight);
        size_t first = rows.size();
        rows.push_back({"fp8_matmul_backward_input", M_, N_ * OC + weight + (accumulate ? dinp : 0), dinp,
                        ProductShape{N_, inputs, OC, true, w_.fast_gradients}});
        rows.push_back({"fp8_matmul_backward_weight", M_, N_ * (inputs + OC) + dweight, dweight,
                        ProductShape{OC, inputs, N_, true, w_.fast_gradients}});
        if (bias) bias_gradient("matmul_backward_bias", N_, OC);
        return rows[first];
    }
    // An activation or gradient to fp8, as it is, or transposed, or both.
    void quantize(double columns, bool measured, int ways) {
        if (!measured) add("find_amax", M_, e * N_ * columns, 0);
        add("fp8_quantize", M_, e * N_ * columns, ways * N_ * columns);
    }
    bool keeps_weights() const { return w_.recompute == Recompute::none; }
    void weight_copy(double weight) {
        if (!keeps_weights()) add("fp8_quantize", M_, e * weight, weight);
    }
    bool norm_measures() const { return d_.n == d_.N; }
    bool activation_measures() const { return norm_measures() || swiglu(); }

    void bias_gradient(const char* launcher, double tokens, double OC) {
        add(launcher, M_, e * tokens * OC + 4 * (bias_slices + 1) * OC, 4 * (bias_slices + 1) * OC, 2);
    }

    // ---- norms

    void norm_forward(bool of_a_sum) {
        double stream = e * n_ * C_, weights = e * sums_of_norm() * C_;
        add("residual_norm_forward", M_, (of_a_sum ? 2 : 1) * stream + weights,
            (of_a_sum ? 2 : 1) * stream + stats() * n_);
    }
    // It sums the columns of what it makes too, where these sums are a bias's gradient.
    void norm_backward(bool of_the_stream = true) {
        double stream = e * n_ * C_;
        double partials =
            4 * C_ * NormBackwardBlocks(d_.n, d_.C, d_.C / vectors()).count;  // bytes of one partial sum
        double sums = sums_of_norm(), gradients = 4 * sums * C_, of_columns = of_the_stream && c_.bias;
        add("norm_backward", M_,
            3 * stream + e * C_ + stats() * n_ + (sums + of_columns) * partials + gradients,
            stream + (2 + of_columns) * partials + gradients + of_columns * 4 * C_, 2);
    }
    // Adds the gradient of the bias of a matrix whose output the stream takes up.
    void bias_gradient_of_stream() {
        if (c_.bias) add("add_bias_sums", M_, 8 * C_, 4 * C_);
    }

    // ---- embedding

    void embedding() {
        bool learned = c_.position == PositionKind::learned;
        double tables = learned ? 2 : 1, vectors = std::min<double>(N_, c_.vocab_size) + (learned ? w_.T : 0);
        add("embedding_forward", M_, e * vectors * C_ + tables * 4 * N_, e * N_ * C_);
        rows.back().sent = RowsSent::scattered;
        mark(StepPart::embedding_forward);
        double gradients = 4 * vectors * C_;
        add("embedding_backward", M_, e * N_ * C_ + gradients + tables * 8 * N_, gradients,
            sum_rows_launches(d_.N));
        rows.back().sent = RowsSent::gathered;
        mark(StepPart::embedding_backward);
    }

    // ---- block

    // A convolution over two taps, and its gradients.
    void convolution_forward(double inputs, double OC, bool measured, RowsSent sent) {
        linear_forward(inputs, 2 * OC, measured).sent = sent;
        add("causal_conv_forward", M_, 2 * e * N_ * OC, e * N_ * OC);
    }
    void convolution_backward(double inputs, double OC, RowsSent sent, bool accumulate) {
        bias_gradient("matmul_backward_bias", N_, OC);
        add("causal_conv_backward", M_, e * N_ * OC, 2 * e * N_ * OC);
        linear_backward(inputs, 2 * OC, false, false, accumulate).sent = sent;
    }
    void qkv_forward() {
        if (!c_.local_filter) {
            linear_forward(C_, d_.QKV, norm_measures()).sent = RowsSent::gathered;
            return;
        }
        convolution_forward(C_, d_.H, norm_measures(), RowsSent::gathered);
        convolution_forward(d_.H, C_, false, RowsSent::scattered);
        add("residual_norm_forward", M_, 2 * e * n_ * C_, 2 * e * n_ * C_ + 4 * n_);
        double values = d_.NKV * d_.HS;
        linear_forward(C_, d_.QKV - values, norm_measures()).sent = RowsSent::gathered;
        linear_forward(C_, values, norm_measures());
        add(nullptr, M_, e * N_ * d_.QKV, e * N_ * d_.QKV, 2);
    }
    void qkv_backward() {
        if (!c_.local_filter) {
            bool bias = has_qkv_bias(c_) && !attention_makes_bias_gradient(c_);
            linear_backward(C_, d_.QKV, rotation_ends_attention(c_), bias).sent = scattered_alone();
            return regather(in_place_.norm1);
        }
        double values = d_.NKV * d_.HS;
        add(nullptr, M_, e * N_ * d_.QKV, e * N_ * d_.QKV, 2);
        linear_backward(C_, d_.QKV - values, false, has_qkv_bias(c_)).sent = RowsSent::scattered;
        regather(in_place_.filtered);
        add(nullptr, M_, 0, e * n_ * C_);
        norm_backward(false);
        convolution_backward(d_.H, C_, RowsSent::gathered, false);
        linear_backward(C_, values, false, has_qkv_bias(c_));
        regather(in_place_.norm1);
        convolution_backward(C_, d_.H, scattered_alone(), true);
        add("elementwise", M_, 2 * e * n_ * C_, e * n_ * C_);
    }
    void finish_qkv() {
        if (!c_.qk_norm) return rope();
        add("qk_norm_forward", M_, e * N_ * d_.QKV + angles(), e * N_ * d_.QKV + 4 * N_ * turned_heads());
    }
    void finish_qkv_backward() {
        if (!c_.qk_norm) return rope(w_.fp8 && rotation_ends_attention(c_));
        double partials = 8.0 * d_.HS * even_share((int)N_, qk_norm_partials);
        double heads = e * N_ * turned_heads() * d_.HS;
        add("qk_norm_backward", M_, 2 * heads + 4 * N_ * turned_heads() + angles() + partials,
            heads + partials, 2);
    }
    // Queries and keys are rotated in place, by a table of angles and the token's position.
    // measures: it reads all others too, for the amax.
    void rope(bool measures = false) {
        double turned = e * N_ * turned_heads() * d_.R;
        if (d_.R > 0) add("rope", M_, (measures ? e * N_ * d_.QKV : turned) + angles(), turned);
    }
    double turned_heads() const { return d_.NH + d_.NKV; }
    double angles() const { return 4.0 * w_.T * d_.R + 4 * N_; }

    // `products` of scores' size for each key that a query sees, in all heads.
    void attention(const char* launcher, int layer, int products, double read, double written) {
        double keys = mean_keys(c_, layer, w_.T, true);
        rows.push_back({launcher, M_, read, written, {}, 2 * products * keys * N_ * d_.A, keys});
    }
    void attention_forward(int layer) {
        attention("attention_forward", layer, 2, e * N_ * d_.QKV, e * N_ * d_.A + 4 * N_ * d_.NH);
    }
    // The sums of dq are there for queries that see keys of more than one tile.
    void attention_backward(int layer) {
        constexpr double tile = 128;
        double padded = ceil_div(w_.T, (int)tile) * tile, rows_of_heads = w_.B * d_.NH * padded,
               statistics = 8 * rows_of_heads + 4 * w_.B * padded,
               sums = 4.0 * w_.B * d_.NH * (padded - tile) * d_.HS;
        add("attention_backward", M_, 2 * e * N_ * d_.A + 4 * N_ * d_.NH, statistics);
        // sums of the columns of each 16 rows
        double partials = attention_makes_bias_gradient(c_) ? 4.0 * w_.B * ceil_div(w_.T, 16) * d_.QKV : 0;
        attention("attention_backward", layer, 5, e * N_ * (d_.QKV + d_.A) + statistics + sums,
                  e * N_ * d_.QKV + sums + partials);
        if (partials > 0) add("attention_backward", M_, partials + 4 * d_.QKV, 4 * d_.QKV);
    }
    void mlp_hidden() {
        linear_forward(C_, d_.F1, norm_measures(), false, gelu_fused()).sent = gathered_alone();
        if (!gelu_fused()) activation_forward();
    }
    void activation_forward() {
        add(swiglu() ? "swiglu_forward" : "elementwise", M_, e * N_ * d_.F1, e * N_ * d_.F);
    }
    void block(int layer, bool first) {
        norm_forward(!first);
        qkv_forward();
        finish_qkv();
        attention_forward(layer);
        linear_forward(d_.A, C_, true).sent = scattered_alone();
        if (sequential()) norm_forward(true);
        mlp_hidden();
        linear_forward(d_.F, C_, activation_measures(), !sequential()).sent = RowsSent::scattered;
        mark(StepPart::block_forward, layer);

        recompute(layer);
        mlp_backward();
        if (sequential()) norm_backward();
        bias_gradient_of_stream();
        linear_backward(d_.A, C_, norm_measures(), false).sent = RowsSent::gathered;
        attention_backward(layer);
        finish_qkv_backward();
        qkv_backward();
        norm_backward();
        mark(StepPart::block_backward, layer);
    }
    void recompute(int layer) {
        if (w_.recompute == Recompute::none) return;
        if (w_.recompute == Recompute::block) {
            norm_forward(false);
            qkv_forward();
            finish_qkv();
            attention_forward(layer);
            if (sequential()) {
                linear_forward(d_.A, C_, true).sent = RowsSent::scattered;
                norm_forward(true);
            } else if (w_.fp8) {
                quantize(d_.A, true, 1);
            }
            mlp_hidden();
            if (w_.fp8) quantize(d_.F, activation_measures(), 1);
            return;
        }
        if (w_.fp8) {
            if (c_.qk_norm) finish_qkv();
            if (w_.recompute == Recompute::elementwise) return;
            norm_forward(false);
            if (!sequential()) rows.back().sent = RowsSent::gathered;
            mlp_hidden();
            return quantize(d_.F, activation_measures(), 1);
        }
        norm_forward(false);
        if (in_place_.norm1) rows.back().sent = RowsSent::gathered;
        if (c_.local_filter) add("residual_norm_forward", M_, e * n_ * C_, e * n_ * C_ + 4 * n_);
        if (c_.qk_norm) finish_qkv();
        if (sequential()) norm_forward(false);
        if (w_.recompute == Recompute::mlp) return mlp_hidden();
        if (!gelu_fused()) activation_forward();
    }
    // In a parallel block it comes after attention, and adds to what that left.
    void mlp_backward() {
        bias_gradient_of_stream();
        linear_backward(d_.F, C_, norm_measures(), false, false, gelu_gradient_fused()).sent =
            gathered_alone();
        if (swiglu()) add("swiglu_backward", M_, e * N_ * (d_.F + d_.F1), e * N_ * d_.F1);
        if (!swiglu() && !gelu_gradient_fused()) add("elementwise", M_, 2 * e * N_ * d_.F, e * N_ * d_.F);
        linear_backward(C_, d_.F1, activation_measures(), c_.bias, !sequential()).sent = RowsSent::scattered;
        if (sequential()) regather(in_place_.norm2);
    }

    // ---- head, where logits exist for a chunk of tokens at a time

    void head() {
        norm_forward(true);
        mark(StepPart::head_forward);
        for (int begin = 0; begin < d_.N; begin += w_.loss_chunk) {
            double tokens = std::min(w_.loss_chunk, d_.N - begin);
            Pass& product = forward(tokens, C_, vocab_);
            if (begin == 0) product.sent = RowsSent::gathered;  // those of all chunks
            double logits = e * tokens * vocab_;
            add("classifier", M_, logits + 4 * tokens, logits + 4 * tokens);
            backward(tokens, C_, vocab_, false);
        }
        add("sum_losses", M_, 4 * N_, 0);
        rows.back().sent = RowsSent::scattered;  // the gradients of all chunks together
        add(nullptr, M_, 0, e * n_ * C_);        // the stream's gradient begins as zeros
        norm_backward();
        mark(StepPart::head_backward);
    }

    // ---- optimizer

    // An optimizer that takes norms, or transforms matrices, has a pass that makes updates of gradients, and
    // then one that steps by them. Slots are read and written by the first.
    void optimizer(SteppedParameters parameters, const ZeroSettings& settings, int units, int layers) {
        bool transforms = settings.transform_scratch;
        double weights = settings.keep_master ? 4 : e, stepped = e + (settings.keep_master ? 4 : 0),
               slots = 4.0 * (double)settings.slots.size(), matrices = transforms ? parameters.matrices : 0,
               others = parameters.all - matrices,
               of_matrices = slots - 4.0 * (double)settings.not_of_matrices.size();
        add(nullptr, 1, 0, 4 * parameters.all);
        add("sums_of_squares", 1, 4 * parameters.all, 0, 2);
        add("clip_scale", 1, 8, 8);
        mark(StepPart::gradient_norm);
        auto step = [&](double count, double slots, int launches) {
            add("optimizer_pass", 1, (4 + weights + slots) * count, (stepped + slots) * count, launches);
        };
        if (settings.takes_norms) {
            add("optimizer_pass", 1, (4 + weights + slots) * others, (4 + slots) * others, units);
            add("sums_of_squares", 1, (4 + weights) * others, 0, 4 * units);
            slots = 0;
        }
        // Muon's updates do not depend on weights.
        if (matrices > 0)
            add("optimizer_pass", 1, (4 + of_matrices) * matrices, (4 + of_matrices) * matrices, layers);
        mark(StepPart::prepare);
        if (matrices > 0) {
            int whole = layers * matrices_of_block(c_);
            add("convert", 1, 4 * matrices, e * matrices, whole);
            add("copy_part", 2, e * matrices, e * matrices, whole);
            mark(StepPart::transform);
            whole_matrices(layers);
            add("convert", 1, e * matrices, 4 * matrices, whole);
            step(matrices, 0, layers);
        }
        if (others > 0) step(others, slots, units);
        mark(StepPart::optimizer);
    }

    // Those of so many blocks, each one in turn.
    void whole_matrices(int layers) {
        for (const TensorRow& row : tensor_table(c_)) {
            if (!row.is_block_matrix()) continue;
            for (const Section& section : row.all_sections()) {
                auto [less, more] = std::minmax(section.rows, row.cols);
                for (Pass& pass : orthogonal_passes((double)less, (double)more, e)) {
                    pass.times *= layers;
                    pass.layer = 0;
                    rows.push_back(pass);
                }
            }
        }
        marked_ = rows.size();
    }

    // ---- fp8

    // Adds the operands that are measured and quantized a second time, because the gradient of a weight sees
    // all rows at once:
    //   rows that are sent in pieces: each piece by itself, one way, and then all of them the other way;
    //   a gradient that waits for its turn, for others have been quantized in its place meanwhile;
    //   rows that have come together again.
    void fp8_again(bool in_pieces, bool late) {
        std::vector<Pass> all;
        bool input_in_pieces = false;
        for (const Pass& pass : rows) {
            std::string_view name = pass.launcher ? pass.launcher : "";
            const ProductShape& product = pass.product;
            bool sent_in_pieces =
                in_pieces && (pass.sent == RowsSent::gathered || pass.sent == RowsSent::scattered);
            all.push_back(pass);
            if (!product.fp8) continue;
            if (name == "fp8_matmul_forward" && sent_in_pieces)
                quantize_again(all, pass, product.rows * product.sums, 0);
            if (name == "fp8_matmul_backward_input") {
                input_in_pieces = sent_in_pieces;
                double read = e * product.rows * product.sums;
                bool was_measured = std::none_of(
                    all.end() - std::min<long>(4, (long)all.size()), all.end(), [&](const Pass& before) {
                        return before.launcher && before.launcher == std::string_view(measures) &&
                               before.read == read;
                    });
                if (sent_in_pieces && was_measured) all.push_back(like(pass, measures, read, 0));
            }
            if (name != "fp8_matmul_backward_weight") continue;
            if (input_in_pieces || late)
                quantize_again(all, pass, product.rows * product.sums, input_in_pieces ? 0 : 1);
            if (pass.sent == RowsSent::regathered && n_ < N_)
                quantize_again(all, pass, product.columns * product.sums, 1);
        }
        rows = std::move(all);
    }
    void quantize_again(std::vector<Pass>& all, const Pass& product, double elements, int ways) {
        all.push_back(like(product, measures, e * elements, 0));
        all.push_back(like(product, "fp8_quantize", e * elements, ways * elements));
    }
    static constexpr const char* measures = "find_amax";
    // Beside a product, in the same layer and for the same gradient.
    static Pass like(const Pass& product, const char* launcher, double read, double written) {
        Pass pass = {launcher, product.times, read, written};
        pass.part = product.part, pass.layer = product.layer;
        pass.for_weight = product.is_weight_gradient();
        return pass;
    }
};
