//! Detection under simulated faults: hundreds of seeds in memory, and proof that a mistake would be noticed.

use gpufleet_tests::sabotage::Sabotage;
use gpufleet_tests::simulation::{Trials, run};

fn over(seeds: std::ops::Range<u64>) -> Trials {
    let mut total = Trials::default();
    for seed in seeds {
        let trials = run(seed, None).unwrap_or_else(|broke| panic!("seed {seed}: {broke:?}"));
        assert!(trials.incidents >= 20, "seed {seed}: {} incident revisions prove little", trials.incidents);
        total.incidents += trials.incidents;
        total.crashes += trials.crashes;
        total.moves += trials.moves;
        total.zombies += trials.zombies;
        total.damaged += trials.damaged;
        total.suppressed += trials.suppressed;
    }
    total
}

#[test]
fn two_hundred_seeds_of_crashes_moves_zombies_and_damaged_snapshots_equal_the_oracle() {
    let total = over(0..200);
    println!("{total:?}");
    assert!(total.crashes > 200 && total.moves > 100 && total.zombies > 50 && total.damaged > 50, "{total:?}");
    assert!(total.suppressed > 0, "no replay has met what was out: {total:?}");
}

#[test]
#[ignore = "long: a thousand seeds more"]
fn a_thousand_seeds_more_equal_the_oracle() {
    println!("{:?}", over(200..1200));
}

#[test]
fn each_sabotage_turns_its_invariant_red() {
    for (sabotage, invariant) in Sabotage::ALL {
        let mut names = Vec::new();
        for seed in 1..24 {
            names.extend(run(seed, Some(sabotage)).err().into_iter().flatten().map(|(invariant, _)| invariant));
            if names.contains(&invariant) {
                break;
            }
        }
        assert!(names.contains(&invariant), "{sabotage:?} must break {invariant}; it broke {names:?}");
    }
}
