//! Measures the two copies: `cargo test --release -p quire-container --lib snapshot::tests::speed -- --ignored
//! --nocapture`.

use std::time::{Duration, Instant};

use super::*;

#[test]
#[ignore = "a measurement"]
fn speed_of_2000_files() {
    let pair = Pair::new();
    for directory in 0..40 {
        let at = pair.from.join(directory.to_string());
        fs::create_dir(&at).unwrap();
        for number in 0..50 {
            fs::write(at.join(format!("file {number}")), testing::noise(32 << 10)).unwrap();
        }
    }
    let per_second = |entries: u64, time: Duration| entries as f64 / time.as_secs_f64();
    rest();
    for round in 0..5 {
        let to = pair.folder.path().join(round.to_string());
        fs::create_dir(&to).unwrap();
        let since = Instant::now();
        let first = copy_of(&pair.from, &to).unwrap();
        let copied = since.elapsed();
        let since = Instant::now();
        let report = first.finish().unwrap();
        let compared = since.elapsed();
        let entries = report.entries;
        println!(
            "{entries} entries: first copy {copied:?}, second copy {compared:?}, {:.0} entries per second",
            per_second(entries, compared)
        );
        assert_eq!(report.recopied, 0);
    }
}
