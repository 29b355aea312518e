//! Exercises the reader and the recipes together, for fuzzers and tests.

use std::io::{self, Read as _};

use super::recipe::{self, TarReader};
use super::{Chunk, Entry, Event, Reader, Segment, TarError, narrow, wide};
use crate::verity::{Algorithm, ObjectId};

/// Reads `bytes` as a tar and as a recipe. If they are a tar, makes its recipe and rebuilds the tar from the recipe.
///
/// # Panics
/// If the rebuilt tar differs, or the reader violates an invariant of its events.
pub fn exercise(bytes: &[u8]) {
    if let Ok((mut skeleton, _)) = recipe::Skeleton::with_positions(bytes) {
        // A recipe of a few bytes may describe a tar of 2^63 bytes.
        drop(io::copy(&mut skeleton.by_ref().take(1 << 20), &mut io::sink()));
    }
    let mut reader = Reader::new(bytes);
    let mut writer = recipe::Writer::new(Vec::new(), Algorithm::Sha256).expect(
        "writing to memory does not \
            fail",
    );
    // The objects: for each entry, the segments in the tar with their bytes.
    let mut objects: Vec<Vec<(Segment, Vec<u8>)>> = Vec::new();
    loop {
        match reader.next_event() {
            Ok(None) => break,
            Err(TarError::Unsupported { .. }) => {}
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert!(matches!(reader.next_event(), Err(TarError::Stopped)));
                return;
            }
            Ok(Some(Event::Verbatim(bytes))) => {
                assert!(!bytes.is_empty());
                writer.verbatim(bytes).expect("writing to memory does not fail");
            }
            Ok(Some(Event::Entry(mut entry))) => {
                check(&entry);
                let segments = entry.segments.to_vec();
                let id = id(objects.len());
                let Ok(object) = store(&mut entry) else { return };
                objects.push(object);
                let content = recipe::Content::Object(&id);
                writer.content(&segments, content).expect("writing to memory does not fail");
            }
        }
    }
    let recipe = writer.finish().expect("writing to memory does not fail");
    let contents = |object: &ObjectId, into: &mut [u8], offset: u64| {
        let parts = objects.get(number(object)).expect("the recipe names stored objects");
        let part = parts.iter().find(|(at, _)| (at.offset..at.end()).contains(&offset));
        let (at, bytes) = part.expect("the recipe names stored objects");
        (&bytes[narrow(offset - at.offset)..]).read(into)
    };
    let mut tar = Vec::new();
    let mut reader = TarReader::new(&recipe[..], contents).expect("this program wrote the recipe");
    let length = reader.read_to_end(&mut tar).expect("this program wrote the recipe");
    assert_eq!(length, bytes.len());
    assert!(tar == bytes, "the recipe gives another tar");
}

fn id(number: usize) -> ObjectId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&wide(number).to_le_bytes());
    ObjectId::from_bytes(&bytes).expect("32 bytes are an id")
}

fn number(id: &ObjectId) -> usize {
    let bytes = id.as_bytes().first_chunk().expect("an id has 32 bytes");
    usize::try_from(u64::from_le_bytes(*bytes)).expect("the number was a length")
}

fn check(entry: &Entry<'_, &[u8]>) {
    assert!(entry.metadata.permissions <= 0o7777);
    assert!(entry.metadata.mtime.nanoseconds < 1_000_000_000);
    assert!(entry.path.split(|&byte| byte == b'/').all(|name| name != b".." && name != b"."));
    assert!(i64::try_from(entry.size).is_ok());
    let mut end = 0;
    for segment in entry.segments {
        assert!(segment.length > 0 && segment.offset >= end);
        end = segment.end();
    }
    assert!(end <= entry.size);
    assert!(entry.xattrs.clone().is_sorted_by(|a, b| a.0 < b.0));
}

/// Reads the content alternately with both functions, and returns the bytes of the segments.
fn store(entry: &mut Entry<'_, &[u8]>) -> Result<Vec<(Segment, Vec<u8>)>, TarError> {
    let mut parts: Vec<(Segment, Vec<u8>)> =
        entry.segments.iter().map(|&segment| (segment, Vec::new())).collect();
    let mut at = 0;
    let mut current = 0;
    let mut buffer = [0; 1000];
    loop {
        let part = parts.get_mut(current);
        let is_data = part.as_ref().is_some_and(|(segment, _)| segment.offset <= at);
        // Holes may have any size, and only `chunk` skips a hole at once.
        let (zeros, data): (u64, &[u8]) = if is_data && at % 3 == 0 {
            let read = entry.content.read(&mut buffer)?;
            (0, &buffer[..read])
        } else {
            match entry.content.chunk()? {
                None => (0, &[]),
                Some(Chunk::Zeros(count)) => (count, &[]),
                Some(Chunk::Data(data)) => (0, data),
            }
        };
        if zeros == 0 && data.is_empty() {
            break;
        }
        at += zeros + wide(data.len());
        if !data.is_empty() {
            let (segment, bytes) = part.expect("data stands in a segment");
            bytes.extend_from_slice(data);
            current += usize::from(at == segment.end());
        }
    }
    assert_eq!(at, entry.size);
    for (segment, bytes) in &parts {
        assert_eq!(segment.length, wide(bytes.len()));
    }
    Ok(parts)
}
