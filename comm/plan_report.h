/*
The output of the plan command: the fastest layouts as a table, the time and the memory of the best in parts,
why the second lost, warnings, and the command line that trains with the best; or the same as JSON.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/plan_choice.h"          // plan_task
#include "data/run/failures.h"         // effective_training_time
#include "data/run/run_report.h"       // tables_text
#include "comm/machine.h"              // find_machine
#include "comm/plan_search.h"          // Planner
#include "comm/run_device.h"           // choose_matmul_dtype
#include "comm/save_clock.h"           // best_interval
#include "data/base/figures.h"         // human
#include "data/base/json.h"            // json_line
#include "data/base/strings.h"         // name_of_words
#include "data/launch/command_line.h"  // PlanLine
#include "data/options/help.h"         // terminal_width, wrapped
#include "data/run/meter.h"            // flops_per_token

// ----------------------------------------------------------------------------
// figures

struct PlanFigures {
    PlannedStep step;
    StepBreakdown parts;
    size_t memory = 0;  // bytes on the device
    double tokens_per_second = 0;
    double mfu = 0, mfu_causal = 0, hfu = 0;  // shares of the peak of all devices, idle ones included
    double days = 0, cost = 0;                // 0: not given
    double seconds_with_bf16_gradients = 0;   // 0: they are sent in bf16 already, or not at all
};

inline std::string name_of(const GroupCall& call) {
    return text("%s, %s", traffic_names[call.purpose], name_of((Operation)call.operation));
}
inline const char* numbers_of(const GroupCall& call) {
    return call.number_bytes == 4 ? "fp32" : call.number_bytes == 2 ? "bf16" : "fp8";
}

// The parts of a step's time, each with its name.
inline std::vector<std::pair<const char*, double>> named_parts(const StepBreakdown& p) {
    return {{"products", p.products},   {"attention", p.attention}, {"other kernels", p.other_kernels},
            {"optimizer", p.optimizer}, {"bubble", p.bubble},       {"tensor", p.tensor},
            {"pipeline", p.pipeline},   {"data", p.data},           {"together", p.together}};
}
// Names the part, other than products and attention, that takes the most time.
inline const char* most_lost_to(const StepBreakdown& parts) {
    auto named = named_parts(parts);
    return std::max_element(named.begin() + 2, named.end() - 1,
                            [](auto& a, auto& b) { return a.second < b.second; })
        ->first;
}

// PetaFLOP/s-days of a run, with `flops` FLOPs for each parameter and token.
inline double petaflop_days(const PlanLine& line, double flops) {
    return flops * (double)parameter_count(line.options) * (double)line.command.tokens / (1e15 * 86400);
}

inline PlanFigures figures_of(Planner& planner, const PlanLine& line, const Machine& machine,
                              const PlannedStep& step) {
    const Options& o = line.options;
    PlanFigures f;
    f.step = step, f.parts = planner.parts(step.cut), f.memory = planner.total(step.memory);
    f.tokens_per_second = (double)o.global_batch / step.seconds;
    double peak = machine.flops * line.command.gpus;
    f.mfu = flops_per_token(o, o.sequence_length, false) * f.tokens_per_second / peak;
    f.mfu_causal = flops_per_token(o, o.sequence_length, true) * f.tokens_per_second / peak;
    f.hfu = planner.executed_flops(step.cut) / step.seconds / peak;
    f.days = (double)line.command.tokens / f.tokens_per_second / 86400;
    f.cost = 24 * f.days * line.command.gpus * line.command.price;
    if (o.reduce_dtype == Dtype::fp32 && step.cut.dp > 1)
        f.seconds_with_bf16_gradients = planner.seconds_with_gradients_in(Dtype::bf16, step.cut);
    return f;
}

// Returns why the second layout is slower: the part of its time that exceeds the best layout's by most.
inline std::string why_lost(const PlanFigures& best, const PlanFigures& second) {
    auto a = named_parts(best.parts), b = named_parts(second.parts);
    size_t most = 0;
    for (size_t i = 0; i + 1 < a.size(); i++)  // except the last, `together`
        if (b[i].second - a[i].second > b[most].second - a[most].second) most = i;
    double more = second.step.seconds - best.step.seconds;
    return text("2 takes %.3g s more than 1 (%.1f%%), mostly for %s: %.3g s instead of %.3g", more,
                100 * more / best.step.seconds, a[most].first, b[most].second, a[most].second);
}

inline std::vector<std::string> plan_warnings(const Planner& planner, const Machine& machine, int devices,
                                              const PlanFigures& f) {
    std::vector<std::string> warnings;
    const Cut& cut = f.step.cut;
    double room = (double)planner.available(), memory = (double)f.memory;
    if (memory > room)
        warnings.push_back(text("it does not fit: it needs %s of memory, but only %s are available",
                                size_text(f.memory).c_str(), size_text(planner.available()).c_str()));
    else if (planner.pinned(f.step.memory) > planner.host_room())
        warnings.push_back(text(
            "it does not fit: it needs %s of the host's memory for each device, but only %s are available",
            size_text(planner.pinned(f.step.memory)).c_str(), size_text(planner.host_room()).c_str()));
    else if (memory > 0.97 * room)
        warnings.push_back(
            text("memory is within 3%% of the %s available; other programs may not fit on the device",
                 size_text(planner.available()).c_str()));
    const MeshShape shape = mesh_shape(planner.options_of(cut));
    auto crosses_nodes = [&](MeshGroup group) {
        return cut.ranks() > machine.node && in_nodes(machine, line_of((size_t)group, {}, shape)).nodes > 1;
    };
    if (crosses_nodes(MeshGroup::tensor))
        warnings.push_back(text("tensor groups of %d span nodes of %d devices", cut.tp, machine.node));
    if (cut.zero >= 2 && crosses_nodes(MeshGroup::shard))
        warnings.push_back(text("shard groups of %d span nodes, and --zero %d sends between nodes for every "
                                "micro-batch",
                                cut.shard_group, cut.zero));
    if (cut.ranks() < devices)
        warnings.push_back(text("%lld of %d devices stay idle: no layout that uses more is faster",
                                devices - cut.ranks(), devices));
    return warnings;
}

// Returns the disk space that tables need on all machines together, once all rows have been touched.
inline std::string tables_on_disk(const ModelConfig& c, const Layout& layout, Dtype dtype) {
    double files = 0, checkpoint = 0;
    for (int number = 0; number < layout.mesh.pp; number++) {
        TableSizes sizes(c, 1, 1, Stage(c, layout, first_of_stage(number), true), dtype);
        if (sizes.tables() == 0) continue;
        files += (double)sizes.owners * sizes.file_bytes(sizes.own_rows());
        checkpoint += (double)(sizes.owners * sizes.checkpoint_bytes(sizes.own_rows()));
    }
    return text("up to %sB of tables on the disks of all %d ranks, and %sB in a checkpoint, or twice that "
                "while a new base is written",
                human(files).c_str(), layout.mesh.ranks(), human(checkpoint).c_str());
}

// The command line that trains with this cut.
inline std::string training_command(Planner& planner, const PlanLine& line, const Machine& machine,
                                    const Cut& cut) {
    Options planned = planner.options_of(cut), preset;
    preset.model = planned.model;
    std::vector<std::string> told;  // remarks, already in the plan's notes
    apply_model(preset, told);
    complete(static_cast<ModelConfig&>(preset));
    preset.sequence_length = preset.context;
    if (cut.pp_schedule != PipelineSchedule::interleaved) planned.pp_chunks = 0;
    if (cut.zero == 0) planned.shard_group = 0;
    planned.dp = 0;  // follows from the number of processes
    Options usual = planned;
    usual.tp_overlap = 0;
    complete_tensor_overlap(usual);
    if (planned.tp_overlap == usual.tp_overlap) planned.tp_overlap = 0;
    std::string words = "./train_gpt train --model " + planned.model;
    if (cut.ranks() > 1)
        words =
            text("mpirun %s-np %lld ", cut.ranks() > machine.node ? "--hostfile hosts " : "", cut.ranks()) +
            words;
    for (const OptionRow& row : option_table()) {
        bool is_of_both = row.belongs_to(command_train) && row.belongs_to(command_plan);
        bool stands = std::string_view(row.field) == "model" || std::string_view(row.field) == "overwrite";
        if (!is_of_both || stands) continue;
        if (value_text(row, planned) != value_text(row, preset))
            words += " " + option_name(row) + " " + value_text(row, planned);
    }
    if (line.command.tokens > 0) words += text(" --steps %d", planned.steps);
    return words + " --train-data ...";
}

// ----------------------------------------------------------------------------
// failures

// A change to how a run handles failures, and the fraction of its time that it would then spend training.
struct Remedy {
    std::string words;
    double share;
};

struct FailureFigures {
    double hours = 0;                     // between two failures; 0: there are none
    double hours_of[failing_parts] = {};  // likewise, of each part
    double share = 1;                     // fraction of time spent training
    std::vector<Remedy> remedies = {};
};

// Covers the days of training or, if these are not given, a month.
inline FailureFigures failure_figures(const PlanLine& line, const Machine& machine, const PlanFigures& best) {
    constexpr double month = 30;      // days
    constexpr double to_host = 25e9;  // bytes/s from a device
    constexpr double worth_saying = 0.001;
    const PlanOptions& o = line.command;
    const Cut& cut = best.step.cut;
    double staging = 0;
    for (const MemoryClass& one : best.step.memory)
        if (one.on_host) staging += (double)one.bytes;
    FailureModel model;
    model.nodes = ceil_div((int)cut.ranks(), machine.node);
    model.per_node_day = failures_like_observed(o.failures / 1000);
    const struct {
        FailingPart part;
        double given;
    } rates[] = {{FailingPart::machine, o.machine_failures},
                 {FailingPart::network, o.network_failures},
                 {FailingPart::software, o.software_failures}};
    for (auto [part, given] : rates)
        if (given >= 0) model.per_node_day.of[(int)part] = given / 1000;
    if (model.per_node_day.all() == 0) return {};
    double copy = staging / to_host;
    model.save_stall = std::max(copy - best.step.seconds, 0.0);  // the copy overlaps a step's passes
    model.save_time = copy + staging * std::min(machine.node, (int)cut.ranks()) / machine.storage;
    if (o.save_every.unit == Interval::best)
        model.save_interval =
            std::max(best_interval(model.save_stall, 1 / model.per_second()), 2 * model.save_time);
    else if (o.save_every.count > 0)
        model.save_interval =
            o.save_every.count * (o.save_every.unit == Interval::steps ? best.step.seconds : 1);
    model.time_out = o.communication_timeout;
    model.restart = o.restart_time;
    model.spares = o.spares, model.data_ranks = cut.dp, model.elastic = o.elastic;
    double training = seconds_of_day * (best.days > 0 ? best.days : month);

    FailureFigures figures;
    figures.hours = 1 / model.per_second() / 3600, figures.share = effective_training_time(model, training);
    for (int part = 0; part < failing_parts; part++) {
        double rate = model.per_node_day.of[part];
        if (rate > 0) figures.hours_of[part] = figures.hours * model.per_node_day.all() / rate;
    }
    int often = std::max((int)(120 / best.step.seconds), 1);
    const std::pair<std::string, std::function<void(FailureModel&)>> remedies[] = {
        {text("--save-every %d", often), [&](auto& m) { m.save_interval = often * best.step.seconds; }},
        {"--communication-timeout 60", [](auto& m) { m.time_out = 60; }},
        {"restarts in 120 s", [](auto& m) { m.restart = 120; }},
        {text("--spares %d", model.spares + 2), [](auto& m) { m.spares += 2; }},
        {"--elastic on", [](auto& m) { m.elastic = true; }}};
    FailureModel all = model;
    for (auto& [words, apply] : remedies) {
        FailureModel other = model;
        apply(other);
        double share = effective_training_time(other, training);
        if (share < figures.share + worth_saying) continue;
        figures.remedies.push_back({words, share});
        apply(all);
    }
    if (figures.remedies.size() > 1)
        figures.remedies.push_back({"all of these", effective_training_time(all, training)});
    return figures;
}

inline std::string failures_text(const FailureFigures& f, double days) {
    auto time = [](double hours) {
        return hours < 48 ? text("%.3g h", hours) : text("%.3g days", hours / 24);
    };
    std::string words = "one in " + time(f.hours), parts;
    for (int part = 0; part < failing_parts; part++)
        if (f.hours_of[part] > 0)
            append_item(parts, text("of %s in %s", name_of_part[part], time(f.hours_of[part]).c_str()));
    words += " (" + parts + ")";
    words += text("; %.1f%% of the time is spent training", 100 * f.share);
    if (days > 0 && f.share > 0) words += text(", %.3g days in all", days / f.share);
    for (const Remedy& one : f.remedies)
        words += text("%s %.1f%% with %s", &one == &f.remedies[0] ? "; it would be" : ",", 100 * one.share,
                      one.words.c_str());
    return words;
}

// ----------------------------------------------------------------------------
// JSON

inline nlohmann::ordered_json layout_to_json(Planner& planner, const PlanLine& line, const Machine& machine,
                                             const PlanFigures& f) {
    const Cut& cut = f.step.cut;
    nlohmann::ordered_json memory, parts;
    BytesSent sent = planner.sent(cut);
    for (const MemoryClass& one : f.step.memory) memory[one.name] = one.bytes;
    for (auto [name, seconds] : named_parts(f.parts)) parts[name_of_words(name)] = seconds;
    nlohmann::ordered_json json = {
        {"tp", cut.tp},
        {"cp", cut.cp},
        {"pp", cut.pp},
        {"dp", cut.dp},
        {"micro_batch", cut.micro_batch},
        {"micro_batches", planner.micro_batches(cut)},
        {"pp_schedule", name_of(cut.pp_schedule)},
        {"pp_chunks", cut.pp_chunks},
        {"layers", planner.split(cut)},
        {"tp_overlap", cut.tp_overlap},
        {"zero", cut.zero},
        {"shard_group", cut.shard_group},
        {"reduce_dtype", name_of(line.options.reduce_dtype)},
        {"recompute", name_of(cut.recompute)},
        {"seconds", f.step.seconds},
        {"tokens_per_s", f.tokens_per_second},
        {"mfu", f.mfu},
        {"mfu_causal", f.mfu_causal},
        {"hfu", f.hfu},
        {"seconds_of", parts},
        {"most_lost_to", most_lost_to(f.parts)},
        {"memory_bytes", f.memory},
        {"memory_available", planner.available()},
        {"fits", f.memory <= planner.available() && planner.pinned(f.step.memory) <= planner.host_room()},
        {"host_bytes", planner.pinned(f.step.memory)},
        {"memory", memory},
        {"sent_bytes",
         {{"pipeline", sent.pipeline},
          {"parameters", sent.parameters},
          {"gradients", sent.gradients},
          {"updates", sent.updates}}},
        {"messages", nlohmann::ordered_json::array()}};
    for (const PlannedMessage& one : planner.messages(cut)) {
        json["messages"].push_back({{"what", name_of(one.call)},
                                    {"group", group_name(one.call)},
                                    {"numbers", numbers_of(one.call)},
                                    {"ranks", one.call.group.ranks},
                                    {"nodes", one.nodes},
                                    {"bytes", one.call.bytes},
                                    {"seconds", one.seconds}});
    }
    if (f.seconds_with_bf16_gradients > 0)
        json["seconds_with_bf16_gradients"] = f.seconds_with_bf16_gradients;
    if (f.days > 0) json["days"] = f.days;
    if (f.cost > 0) json["cost"] = f.cost;
    json["warnings"] = plan_warnings(planner, machine, line.command.gpus, f);
    json["command"] = training_command(planner, line, machine, cut);
    return json;
}

// Rounds figures to nine digits, so that a plan is the same whatever device the program is built for:
// compilers round sums of products in different places. Whole numbers, such as bytes, are not changed.
inline void round_figures(nlohmann::ordered_json& json) {
    constexpr double nothing = 1e-12;  // the rounding error of times that are equal
    if (json.is_structured())
        for (auto& one : json) round_figures(one);
    if (!json.is_number_float()) return;
    double value = json;
    if (value != std::floor(value)) json = std::abs(value) < nothing ? 0.0 : std::stod(text("%.9g", value));
}

inline nlohmann::ordered_json plan_to_json(Planner& planner, const PlanLine& line, const Machine& machine,
                                           const std::vector<PlanFigures>& figures) {
    nlohmann::ordered_json layouts = nlohmann::ordered_json::array();
    for (const PlanFigures& f : figures) layouts.push_back(layout_to_json(planner, line, machine, f));
    nlohmann::ordered_json json = {{"simulated", true},
                                   {"model", line.options.model},
                                   {"parameters", parameter_count(line.options)},
                                   {"gpus", line.command.gpus},
                                   {"machine", machine_to_json(machine)},
                                   {"global_batch", line.options.global_batch},
                                   {"notes", line.notes},
                                   {"layouts", layouts}};
    if (line.command.tokens > 0) {
        json["tokens"] = line.command.tokens;
        json["petaflop_days_6n"] = petaflop_days(line, 6);
        json["petaflop_days_8n"] = petaflop_days(line, 8);
    }
    if (figures.size() > 1) json["runner_up"] = why_lost(figures[0], figures[1]);
    FailureFigures failures = failure_figures(line, machine, figures[0]);
    json["failures"] = {{"hours_between", failures.hours},
                        {"hours_between_of",
                         {{"machines", failures.hours_of[(int)FailingPart::machine]},
                          {"network", failures.hours_of[(int)FailingPart::network]},
                          {"software", failures.hours_of[(int)FailingPart::software]}}},
                        {"training_share", failures.share}};
    for (const Remedy& one : failures.remedies)
        json["failures"]["with"].push_back({{"what", one.words}, {"training_share", one.share}});
    for (const char* part : {"layouts", "failures"}) round_figures(json[part]);
    return json;
}

// ----------------------------------------------------------------------------
// text

inline std::string schedule_text(const Cut& cut) {
    if (cut.pp == 1) return "-";
    return name_of(cut.pp_schedule) + (cut.pp_chunks > 1 ? text(" x%d", cut.pp_chunks) : "");
}

// host: adds a column for the host's memory.
inline std::string plan_table(const Planner& planner, const std::vector<PlanFigures>& figures, bool host) {
    bool contexts = std::ranges::any_of(figures, [](const PlanFigures& f) { return f.step.cut.cp > 1; });
    std::string table = contexts ? "    tp   cp" : "    tp";
    table += "   pp    dp  micro  schedule         zero  shards  recompute     s/step  "
             "tokens/s   MFU  causal"
             "   HFU  memory";
    table += host ? "  host\n" : "\n";
    int number = 1;
    for (const PlanFigures& f : figures) {
        const Cut& cut = f.step.cut;
        table += text(
            "%2d %3d%s %4d %5d  %5d  %-15s %5d  %6d  %-11s %8.4g  %8s  %3.0f%%  %5.0f%%  %3.0f%%  %5.0f%%",
            number++, cut.tp, contexts ? text(" %4d", cut.cp).c_str() : "", cut.pp, cut.dp, cut.micro_batch,
            schedule_text(cut).c_str(), cut.zero, cut.shard_group, name_of(cut.recompute), f.step.seconds,
            human(f.tokens_per_second).c_str(), 100 * f.mfu, 100 * f.mfu_causal, 100 * f.hfu,
            100 * (double)f.memory / (double)planner.available());
        if (host)
            table +=
                text("  %3.0f%%", 100 * (double)planner.pinned(f.step.memory) / (double)planner.host_room());
        table += "\n";
    }
    table += "\n    of a step:  products  attention  others  optimizer  bubble  tensor  pipeline   data  "
             "most lost to\n";
    number = 1;
    for (const PlanFigures& f : figures) {
        const StepBreakdown& p = f.parts;
        auto share = [&](double seconds) { return 100 * seconds / f.step.seconds; };
        table += text("%2d %20.1f%% %9.1f%% %6.1f%% %9.1f%% %6.1f%% %6.1f%% %8.1f%% %5.1f%%  %s\n", number++,
                      share(p.products), share(p.attention), share(p.other_kernels), share(p.optimizer),
                      share(p.bubble), share(p.tensor), share(p.pipeline), share(p.data), most_lost_to(p));
    }
    return table;
}

inline std::string plan_text(Planner& planner, const PlanLine& line, const Machine& machine,
                             const std::vector<PlanFigures>& figures) {
    const Options& o = line.options;
    const PlanOptions& command = line.command;
    const PlanFigures& best = figures[0];
    const Cut& cut = best.step.cut;
    constexpr int indent = 13;
    constexpr double worth_saying = 0.998;  // report a step only below this share of the best
    std::string result;
    auto say = [&](const char* what, const std::string& words) {
        std::string head = what;
        head.resize(indent, ' ');
        result += head + wrapped(words, indent, indent, terminal_width());
    };
    say("model", text("%s: %s parameters, steps of %s tokens in sequences of %d", o.model.c_str(),
                      human((double)parameter_count(o)).c_str(), human((double)o.global_batch).c_str(),
                      o.sequence_length));
    if (std::string tables = tables_text(o); !tables.empty()) say("tables", tables);
    say("machine",
        text("%d devices in nodes of %d; each: %s of %s FLOP/s in products, %s of memory at %sB/s, "
             "%sB/s to its node and %sB/s to others",
             command.gpus, machine.node, human(machine.gemm_flops).c_str(), human(machine.flops).c_str(),
             size_text((size_t)machine.memory).c_str(), human(machine.memory_bandwidth).c_str(),
             human(machine.node_bandwidth).c_str(), human(machine.network).c_str()));
    say("", machine.measured ? text("All figures are simulated, with rates that --measure wrote to %s.",
                                    command.machine.c_str())
                             : "All figures are simulated with rates that are expected of such devices; none "
                               "is measured.");
    for (const std::string& note : line.notes) say("note", note);
    result += "\n" + plan_table(planner, figures, o.offload != Offload::none) + "\n";
    if (figures.size() > 1) say("runner-up", why_lost(best, figures[1]));
    say("layout",
        text("%d%s x %d x %d ranks (tensor%s, pipeline, data); %lld micro-batches a step%s%s", cut.tp,
             cut.cp > 1 ? text(" x %d", cut.cp).c_str() : "", cut.pp, cut.dp, cut.cp > 1 ? ", context" : "",
             planner.micro_batches(cut),
             cut.pp > 1 ? text("; parts of %s", layers_text(planner.split(cut)).c_str()).c_str() : "",
             cut.tp > 1 ? text("; rows sent in pieces: %d", cut.tp_overlap).c_str() : ""));
    std::string memory;
    for (const MemoryClass& one : best.step.memory)
        memory +=
            text("%s %s%s, ", one.name, size_text(one.bytes).c_str(), one.on_host ? " on the host" : "");
    say("memory", memory + text("%s of %s on a device%s", size_text(best.memory).c_str(),
                                size_text(planner.available()).c_str(),
                                cut.pp > 1 ? " of the stage that needs most" : ""));
    if (o.ngram_place == TablePlace::disk && !o.ngram.empty())
        say("disk", tables_on_disk(o, planner.layout(cut, 1),
                                   zero_settings(o).rows_dtype((size_t)machine.element_bytes)));
    const char* head = "messages";
    for (const PlannedMessage& one : planner.messages(cut)) {
        say(head, text("%s (%s): %s of %s in %.3g ms, between %d ranks %s", name_of(one.call).c_str(),
                       group_name(one.call), size_text((size_t)one.call.bytes).c_str(), numbers_of(one.call),
                       1e3 * one.seconds, one.call.group.ranks,
                       one.nodes == 1 ? "of a node" : text("in %d nodes", one.nodes).c_str()));
        head = "";
    }
    if (BytesSent sent = planner.sent(cut); sent.all() > 0)
        say("", text("in a step, a rank sends %s of parameters, %s of gradients, %s%s to other stages",
                     size_text((size_t)sent.parameters).c_str(), size_text((size_t)sent.gradients).c_str(),
                     sent.updates > 0 ? (size_text((size_t)sent.updates) + " of updates, ").c_str() : "",
                     size_text((size_t)sent.pipeline).c_str()));
    if (double seconds = best.seconds_with_bf16_gradients;
        0 < seconds && seconds < worth_saying * best.step.seconds)
        say("", text("with --reduce-dtype bf16, which halves the bytes of gradients, a step takes %.4g s "
                     "(%+.1f%%)",
                     seconds, 100 * (seconds / best.step.seconds - 1)));
    if (command.tokens > 0) {
        say("run", text("%d steps, %.3g days%s; %.4g PetaFLOP/s-days at 6 FLOPs per parameter and token, "
                        "%.4g at 8, as with recomputation",
                        o.steps, best.days,
                        best.cost > 0 ? text(", which cost %s", human(best.cost).c_str()).c_str() : "",
                        petaflop_days(line, 6), petaflop_days(line, 8)));
    }
    if (FailureFigures failures = failure_figures(line, machine, best); failures.hours > 0)
        say("failures", failures_text(failures, best.days));
    for (const std::string& warning : plan_warnings(planner, machine, command.gpus, best))
        say("warning", warning);
    return result + "\n" + training_command(planner, line, machine, cut) + "\n";
}

// ----------------------------------------------------------------------------
// the command

inline PlanTask plan_task(const PlanLine& line, const Machine& machine) {
    auto given_number = [&](const char* name) {
        return std::ranges::any_of(line.given, [&](const GivenOption& option) {
            return option_name(*option.row) == name && option.value != "auto" && option.value != "0";
        });
    };
    PlanTask task = plan_task(line.options, line.given, machine, line.command.gpus);
    task.keeps_tp = given_number("--tp"), task.keeps_pp = given_number("--pp");
    task.exposed = line.command.exposed;
    return task;
}

// The layout of the command line, as `train` would complete it.
inline Cut given_cut(Planner& planner, const PlanLine& line) {
    Options o = line.options;
    complete_layout(o, line.command.gpus);
    if (std::string reason = fp8_refusal(o); o.matmul_dtype == MatmulDtype::fp8 && !reason.empty())
        fail("--matmul-dtype fp8: %s, or give --matmul-dtype auto", reason.c_str());
    Cut cut = o;
    if (cut.recompute == Recompute::automatic) {
        cut.recompute = least_recomputation([&](Recompute kind) {
            cut.recompute = kind;
            return planner.fits(cut);
        });
    }
    return cut;
}

// Fails, and reports what would fit.
[[noreturn]] inline void refuse_plan(Planner& planner, const PlanLine& line, const PlanTask& task) {
    PlannedStep least = planner.smallest();
    if (least.memory.empty() || planner.fits(least.cut)) {
        fail("plan: no layout divides %s and the %lld sequences of a step evenly with these options; leave "
             "out some of the layout options%s",
             line.options.model.c_str(), line.options.global_batch / line.options.sequence_length,
             task.keeps_schedule && line.options.pp_schedule == PipelineSchedule::gpipe
                 ? ", or gpipe, which is planned for few micro-batches only"
                 : "");
    }
    // Doubles the device count until the model fits, then bisects: with more devices, none needs more memory.
    std::string nearest;
    constexpr int most = 1 << 20;
    auto is_enough = [&](int devices) {
        PlanTask larger = task;
        larger.devices = devices;
        Planner other(larger);
        PlannedStep smallest = other.smallest();
        if (smallest.memory.empty() || !other.fits(smallest.cut)) return false;
        const Cut& cut = smallest.cut;
        nearest =
            text("%d devices are enough (--tp %d --cp %d --pp %d --zero %d --micro-batch %d --recompute %s)",
                 devices, cut.tp, cut.cp, cut.pp, cut.zero, cut.micro_batch, name_of(cut.recompute));
        return true;
    };
    int too_few = task.devices, enough = 2 * too_few;
    while (enough <= most && !is_enough(enough)) too_few = enough, enough *= 2;
    while (!nearest.empty() && enough - too_few > 1) {
        int middle = too_few + (enough - too_few) / 2;
        (is_enough(middle) ? enough : too_few) = middle;
    }
    fail("plan: %s does not fit on %d devices: the smallest layout, --tp %d --cp %d --pp %d --zero %d, needs "
         "%s on "
         "each, but only %s are available; %s",
         line.options.model.c_str(), task.devices, least.cut.tp, least.cut.cp, least.cut.pp, least.cut.zero,
         size_text(planner.total(least.memory)).c_str(), size_text(planner.available()).c_str(),
         nearest.empty() ? "more devices do not help, so use larger ones, or a larger --global-batch"
                         : nearest.c_str());
}

// The machine that the options name, or the card that is here.
inline Machine planned_machine(const std::string& name) {
    if (!name.empty()) return find_machine(name);
    if (const Card* card = card_here()) return machine_of(*card);
    fail("--machine: missing, and this device is not a known card; name one such as h100, or give cpu or a "
         ".json file");
}

inline std::string plan(const PlanLine& line) {
    constexpr int rows = 5;  // lines in the table
    const Machine machine = planned_machine(line.command.machine);
    check_plan(line.options, machine);
    if (is_given("--pp-schedule", line.given)) check_pipeline_options(line.options);
    const PlanTask task = plan_task(line, machine);
    Planner planner(task);
    std::vector<PlannedStep> steps =
        line.command.explain ? std::vector{planner.planned(given_cut(planner, line))} : planner.best(rows);
    if (steps.empty()) refuse_plan(planner, line, task);
    std::vector<PlanFigures> figures;
    for (const PlannedStep& step : steps) figures.push_back(figures_of(planner, line, machine, step));
    return line.command.format == PlanFormat::json ? json_line(plan_to_json(planner, line, machine, figures))
                                                   : plan_text(planner, line, machine, figures);
}

// For all ranks: runs the command.
inline void plan_or_measure(const PlanLine& line, const World& world) {
    if (line.command.measure.empty()) return print_text(plan(line));
    world.on_all_ranks([&] { choose_matmul_dtype(line.options); });
    choose_automatic_dtype(line.options, world);
    measure_machine(line.command.measure, world);
}
