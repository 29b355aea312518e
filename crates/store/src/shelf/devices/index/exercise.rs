//! What fuzzers do with an index.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::{Builder, Index};

/// Reads a file as the index of a device, for fuzzers: what is accepted holds together, and comes back when it is
/// written.
///
/// # Errors
/// When the file cannot be read.
///
/// # Panics
/// When an index does not hold together.
pub fn exercise_data_index(file: &File) -> io::Result<()> {
    let size = file.metadata()?.len();
    let Ok(index) = Index::read(file, size)? else { return Ok(()) };
    let mut builder = Builder::default();
    for entry in &index.entries {
        assert!(entry.until() <= index.header.bytes);
        assert!(index.places(&entry.id).contains(entry));
        if entry.size > 0 {
            assert_eq!(index.at(entry.offset), Some(entry));
            assert_eq!(index.before(entry.until().saturating_sub(1)), Some(entry));
        }
        builder.add(*entry);
    }
    for record in &index.records {
        assert_eq!(index.record(&record.id), Some(record));
        assert_eq!(index.record_of(&record.pieces), Some(record));
        assert_eq!(record.pieces.iter().map(|it| it.len).sum::<u64>(), record.size);
        builder.add_record(record.clone());
    }
    let encoded = builder.encode(&index.header)?;
    file.set_len(0)?;
    file.write_all_at(&encoded, 0)?;
    let again = Index::read(file, file.metadata()?.len())?.expect("it was written just now");
    assert!(again.has_all_of(&index) || index.header.dropped > 0);
    assert_eq!((again.entries.len(), &again.records), (index.entries.len(), &index.records));
    Ok(())
}
