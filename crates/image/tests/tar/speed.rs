//! Measures the speed of reading tars. Run: `cargo test --release -p quire-image --test tar -- --ignored --nocapture
//! speed`.

use std::hint::black_box;
use std::io::Read as _;
use std::time::Instant;

use image::tar::recipe::{Content, TarReader, Writer};
use image::tar::{Chunk, Event, Reader};
use image::verity::{Algorithm, ObjectId};

use super::build::{end, member, pax};

/// Makes 600 MB in 13,700 files with sizes as in a root filesystem: most are small, and large ones hold most bytes.
fn layer() -> Vec<u8> {
    let mut tar = Vec::with_capacity(640 << 20);
    let data: Vec<u8> = (0..16_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    for number in 0..13_700_usize {
        let size = match number % 100 {
            0..60 => number * 7 % 4000,
            60..95 => number * 31 % 60_000,
            95..99 => number * 131 % 800_000,
            _ => 1_000_000 + number * 1009 % 2_000_000,
        };
        if number % 3 == 0 {
            tar.extend(pax(&[("mtime", "1350244992.023960108")]));
        }
        tar.extend(member(
            format!("usr/share/d{}/{number}", number % 500).as_bytes(),
            b'0',
            &data[..size],
        ));
    }
    tar.extend(end());
    tar
}

#[track_caller]
fn report(what: &str, bytes: usize, mut work: impl FnMut()) {
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    let megabytes = f64::from(u32::try_from(bytes / 1000).unwrap()) / 1000.0;
    println!("{what}: {:.0} MB/s (median {:.3} s of 5)", megabytes / times[2], times[2]);
}

#[test]
#[ignore = "a measurement, not a test"]
fn speed() {
    let tar = layer();
    println!("{} bytes", tar.len());
    let mut copy = vec![0; 256 << 10];
    report("copying through 256 KiB, the floor", tar.len(), || {
        for piece in tar.chunks(copy.len()) {
            copy[..piece.len()].copy_from_slice(piece);
            black_box(&copy);
        }
    });
    report("entries, content passed over", tar.len(), || {
        let mut reader = Reader::new(&tar[..]);
        while let Some(entry) = reader.next_entry().unwrap() {
            black_box(entry.path);
        }
    });
    report("entries and chunks", tar.len(), || {
        let mut reader = Reader::new(&tar[..]);
        while let Some(mut entry) = reader.next_entry().unwrap() {
            while let Some(Chunk::Data(bytes)) = entry.content.chunk().unwrap() {
                black_box(bytes);
            }
        }
    });
    let mut buffer = vec![0; 1 << 20];
    report("entries read into 1 MiB", tar.len(), || {
        let mut reader = Reader::new(&tar[..]);
        while let Some(mut entry) = reader.next_entry().unwrap() {
            while entry.content.read(&mut buffer).unwrap() > 0 {
                black_box(&buffer);
            }
        }
    });
    let id = ObjectId::from_bytes(&[7; 32]).unwrap();
    let mut recipe = Vec::new();
    report("entries, chunks and the recipe", tar.len(), || {
        let mut reader = Reader::new(&tar[..]);
        let mut writer = Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
        while let Some(event) = reader.next_event().unwrap() {
            match event {
                Event::Verbatim(bytes) => writer.verbatim(bytes).unwrap(),
                Event::Entry(entry) => {
                    writer.content(entry.segments, Content::Object(&id)).unwrap();
                }
            }
        }
        recipe = writer.finish().unwrap();
    });
    println!("the recipe has {} bytes", recipe.len());
    let zeros = vec![0; 4 << 20];
    report("rebuilding", tar.len(), || {
        let objects = |_: &ObjectId, into: &mut [u8], _: u64| (&zeros[..]).read(into);
        let mut tar = TarReader::new(&recipe[..], objects).unwrap();
        std::io::copy(&mut tar, &mut std::io::sink()).unwrap();
    });
    // Measure the cost of entries without content.
    let mut headers = Vec::new();
    for number in 0..200_000 {
        headers.extend(pax(&[("mtime", "1350244992.023960108")]));
        headers.extend(member(format!("usr/share/{number}").as_bytes(), b'0', b""));
    }
    let start = Instant::now();
    let mut reader = Reader::new(&headers[..]);
    while reader.next_entry().unwrap().is_some() {}
    println!("{:.0} ns an entry with pax", start.elapsed().as_secs_f64() * 5000.0);
}
