/*
Moves a checkpoint from one layout to another, on all ranks of mpirun, for test/scripts/check_reshard.sh; and
continues a run with a table beside the model, for test/scripts/check_contributors.sh.

    reshard fill RUN LAYOUT         saves a state with known values
    reshard move LAYOUT TO FROM...  loads each checkpoint, compares every byte of the state, saves it in the
                                    folder TO, and compares the tensors of both byte for byte

    reshard table RUN STEP          continues a run from its newest checkpoint, which it compares byte for
                                    byte, up to this step, and saves after each step

A LAYOUT is a list such as tp=2,dp=3,shard=3,zero=3; also pp, copies and offload. move prints a line "ok ..."
or "FAILED ..." for each FROM.
*/
#include "comm/watchdog.h"
#include "comm/placement.h"
#include "data/base/strings.h"
#include "test/comm/checkpoint_testing.h"
#include "test/comm/hash_table.h"

namespace {

struct Layout {
    MeshShape shape;
    ZeroSettings settings = {.keep_master = true};
};

Layout parse_layout(const std::string& list) {
    Layout layout;
    for (const std::string& item : comma_separated(list)) {
        size_t equals = item.find('=');
        std::string key = item.substr(0, equals);
        int value = equals == item.npos ? 0 : atoi(item.c_str() + equals + 1);
        if (key == "tp")
            layout.shape.tp = value;
        else if (key == "pp")
            layout.shape.pp = value;
        else if (key == "dp")
            layout.shape.dp = value;
        else if (key == "shard")
            layout.shape.shard = value;
        else if (key == "copies")
            layout.shape.copies = value;
        else if (key == "zero")
            layout.settings.level = value;
        else if (key == "offload")
            layout.settings.offload = value;
        else
            fail("'%s': no such key; see test/tools/reshard.cu", item.c_str());
    }
    return layout;
}

void save(const World& world, ToyState& toy, const std::string& run_dir) {
    CheckpointSaver saver(toy.parts, world, run_dir, {}, true);
    saver.save(about_step(1));
    SaveReport report = saver.finish();
    world.on_all_ranks([&] {
        if (!report.error.empty()) fail("%s", report.error.c_str());
    });
}

void move(const World& world, const std::string& name, const std::string& to,
          const std::vector<std::string>& sources) {
    Layout layout = parse_layout(name);
    ToyState toy(world, layout.shape, toy_model(true), layout.settings);
    for (const std::string& from : sources) {
        std::string result = "ok";
        try {
            fill(toy.state, 1);  // so that no value is right by chance
            CheckpointReader reader(newest_checkpoint(from));
            load_checkpoint(toy.parts, world, reader, false);
            bool wrong = wrong_bytes(toy.state, slots_of(layout.settings)) > 0;
            save(world, toy, to);
            world.on_all_ranks([&] {
                if (wrong) fail("not what was saved");
                if (!world.is_root()) return;
                auto saved = logical_tensors(newest_checkpoint(from)),
                     moved = logical_tensors(newest_checkpoint(to));
                if (saved != moved) fail("saved again, other tensors");
            });
        } catch (const CommonError& error) {
            result = text("FAILED %s:", error.what());
        }
        if (world.is_root()) printf("%s %s -> %s\n", result.c_str(), from.c_str(), name.c_str());
    }
}

void go_on(const World& world, const std::string& run_dir, int last_step) {
    TableRun run(world, run_dir, 2, true);
    auto load = [&] {
        run.load(newest_checkpoint(run_dir));
        world.on_all_ranks([&] {
            if (run.wrong() > 0) fail("%s: step %d is not what was saved", run_dir.c_str(), run.step());
        });
        if (world.is_root()) printf("ok %s is at step %d\n", run_dir.c_str(), run.step());
    };
    if (!checkpoint_steps(run_dir).empty()) load();
    run.train();
    while (run.step() <= last_step) {
        SaveReport report = run.save();
        if (!report.error.empty()) throw CommonError(report.error);
    }
    load();
}

}  // namespace

int main(int argc, char** argv) {
    World world(&argc, &argv, watch_ranks);
    choose_device(world);
    std::vector<std::string> arguments(argv + 1, argv + argc);
    try {
        if (arguments.size() == 3 && arguments[0] == "fill") {
            Layout layout = parse_layout(arguments[2]);
            ToyState toy(world, layout.shape, toy_model(true), layout.settings);
            fill(toy.state);
            save(world, toy, arguments[1]);
        } else if (arguments.size() > 3 && arguments[0] == "move") {
            move(world, arguments[1], arguments[2], {arguments.begin() + 3, arguments.end()});
        } else if (arguments.size() == 3 && arguments[0] == "table") {
            go_on(world, arguments[1], atoi(arguments[2].c_str()));
        } else {
            fail("reshard: see test/tools/reshard.cu for its arguments");
        }
    } catch (const CommonError& error) {
        if (world.is_root()) printf("FAILED %s\n", error.what());
        return 1;
    } catch (const std::exception& error) {
        abort_job(world, error);
    }
    return 0;
}
