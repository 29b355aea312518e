//! Tests the format of recipes in docs/format/recipe.md, and which recipes are refused.

use std::io::{self, Read as _};

use image::tar::Segment;
use image::tar::recipe::{Content, Objects, Operation, Reader, RebuildError, TarReader, Writer};
use image::verity::{Algorithm, ObjectId};

fn id(byte: u8) -> ObjectId {
    ObjectId::from_bytes(&[byte; 32]).unwrap()
}

/// Returns a header for SHA-256 with these records.
fn recipe(records: &[&[u8]]) -> Vec<u8> {
    [&b"QUIREREC\x01\x01\0\0\0\0\0\0"[..], &records.concat()].concat()
}

fn end(length: u64) -> Vec<u8> {
    [&[0][..], &length.to_le_bytes()].concat()
}

/// Rebuilds a tar with objects whose bytes all equal the first byte of their id.
fn build(recipe: &[u8]) -> Result<Vec<u8>, RebuildError> {
    let mut left = 1 << 20;
    let objects = |object: &ObjectId, into: &mut [u8], _: u64| {
        if into.len() > left {
            return Err(io::Error::other("no such object"));
        }
        left -= into.len();
        into.fill(object.as_bytes()[0]);
        Ok(into.len())
    };
    tar(recipe, objects)
}

/// Returns the whole tar of a recipe.
fn tar(recipe: &[u8], objects: impl Objects) -> Result<Vec<u8>, RebuildError> {
    let mut tar = Vec::new();
    let read = TarReader::new(recipe, objects)?.read_to_end(&mut tar);
    let length = read.map_err(|error| error.downcast::<RebuildError>().unwrap())?;
    assert_eq!(length, tar.len());
    Ok(tar)
}

const SEGMENTS: [Segment; 2] =
    [Segment { offset: 512, length: 300 }, Segment { offset: 2048, length: 1 }];

#[test]
fn bytes() {
    let mut writer = Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
    writer.verbatim(b"ab").unwrap();
    writer.verbatim(b"c").unwrap();
    writer.content(&[Segment { offset: 0, length: 128 }], Content::Object(&id(b'x'))).unwrap();
    writer.content(&[], Content::Object(&id(b'y'))).unwrap();
    writer.content(&SEGMENTS, Content::Object(&id(b'z'))).unwrap();
    writer.content(&[Segment { offset: 2, length: 3 }], Content::Inline(b"01234")).unwrap();
    writer.verbatim(&[b'v'; 65536]).unwrap();
    let found = writer.finish().unwrap();
    let expected = recipe(&[
        b"\x01\x03abc",
        b"\x02xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\x80\x01",
        b"\x03zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz\x02\x80\x04\xac\x02\xd4\x09\x01",
        b"\x01\x80\x80\x04234",
        &[b'v'; 65533],
        b"\x01\x03vvv",
        &end(3 + 128 + 301 + 3 + 65536),
    ]);
    assert!(found == expected, "{}", found.escape_ascii());
    let tar = build(&found).unwrap();
    let expected = [&b"abc"[..], &[b'x'; 128], &[b'z'; 301], b"234", &[b'v'; 65536]].concat();
    assert!(tar == expected);
}

/// Tests the example in the document, which was made by hand.
#[test]
fn the_example_is_written_and_read() {
    let mut writer = Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
    writer.verbatim(b"abc").unwrap();
    writer.content(&[Segment { offset: 0, length: 128 }], Content::Object(&id(b'x'))).unwrap();
    writer.content(&SEGMENTS, Content::Object(&id(b'z'))).unwrap();
    let example = include_bytes!("../../../../testdata/formats/recipe");
    assert_eq!(writer.finish().unwrap(), example);
    assert_eq!(build(example).unwrap(), [&b"abc"[..], &[b'x'; 128], &[b'z'; 301]].concat());
}

/// Returns the rows of a table in the document, as cells.
fn table(head: &str) -> Vec<Vec<&'static str>> {
    let document = include_str!("../../../../docs/format/recipe.md");
    let lines = document.lines().skip_while(|line| !line.starts_with(head));
    let rows = lines.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// Splits a recipe by the document's tables.
#[test]
fn the_document_has_the_header_and_the_records() {
    let mut writer = Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
    writer.verbatim(b"a").unwrap();
    writer.content(&[Segment { offset: 0, length: 128 }], Content::Object(&id(b'x'))).unwrap();
    writer.content(&SEGMENTS, Content::Object(&id(b'z'))).unwrap();
    let found = writer.finish().unwrap();
    let mut at = 0;
    for (row, value) in
        table("| offset | size | field |").iter().zip([&b"QUIREREC"[..], &[1], &[1], &[0; 6]])
    {
        let (offset, size): (usize, usize) = (row[0].parse().unwrap(), row[1].parse().unwrap());
        assert_eq!((offset, size), (at, value.len()), "{row:?}");
        assert_eq!(&found[offset..offset + size], value, "{row:?}");
        at += size;
    }
    // Returns the number of a record type by its name. The lengths of the records give their offsets.
    let number = |name: &str| -> u8 {
        let rows = table("| type | name |");
        rows.iter().find(|row| row[1] == name).expect("the document has it")[0].parse().unwrap()
    };
    let verbatim = at;
    let whole = verbatim + 1 + 1 + 1;
    let ranges = whole + 1 + 32 + 2;
    let end = found.len() - 9;
    for (at, name) in [(verbatim, "verbatim"), (whole, "whole"), (ranges, "ranges"), (end, "end")] {
        assert_eq!(found[at], number(name), "{name}");
    }
    assert_eq!(table("| type | name |").len(), 4);
}

#[test]
fn operations() {
    let records: [&[u8]; 2] =
        [b"\x03zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz\x02\x80\x04\xac\x02\xd4\x09\x01", &end(301)];
    let bytes = recipe(&records);
    let mut reader = Reader::new(&bytes[..]).unwrap();
    assert_eq!(reader.algorithm(), Algorithm::Sha256);
    for segment in SEGMENTS {
        let expected = Operation::Range { object: &id(b'z'), segment };
        assert_eq!(reader.next_operation().unwrap(), Some(expected));
    }
    assert_eq!(reader.next_operation().unwrap(), None);
    assert_eq!(reader.next_operation().unwrap(), None);
    assert_eq!(reader.length(), 301);
}

#[test]
fn sha_512() {
    let object = ObjectId::from_bytes(&[b'x'; 64]).unwrap();
    let mut writer = Writer::new(Vec::new(), Algorithm::Sha512).unwrap();
    let segment = [Segment { offset: 0, length: 5 }];
    let error = writer.content(&segment, Content::Object(&id(b'x'))).unwrap_err().to_string();
    assert!(error.contains("is not sha512"), "{error}");
    writer.content(&segment, Content::Object(&object)).unwrap();
    let recipe = writer.finish().unwrap();
    assert_eq!(recipe[9], 2);
    assert_eq!(build(&recipe).unwrap(), b"xxxxx");
}

#[test]
fn writer_errors() {
    let mut writer = Writer::new(Vec::new(), Algorithm::Sha256).unwrap();
    let error = writer.content(&SEGMENTS, Content::Inline(&[0; 2048])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the content has 2048 bytes, but one of its segments ends at byte 2049"
    );
    let mut small = [0; 20];
    let mut writer = Writer::new(&mut small[..], Algorithm::Sha256).unwrap();
    writer.verbatim(b"abc").unwrap();
    assert_eq!(writer.finish().unwrap_err().to_string(), "cannot write the recipe");
}

#[track_caller]
fn check_refused(recipe: &[u8], expected: &str) {
    let error = build(recipe).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn refused_headers() {
    check_refused(b"", "at byte 0: it ends within a record");
    check_refused(b"QUIREREC\x01\x01\0\0\0\0\0", "it ends within");
    check_refused(b"QUIRERED\x01\x01\0\0\0\0\0\0", "it is not a recipe");
    check_refused(
        b"QUIREREC\x02\x01\0\0\0\0\0\0",
        "format version 2, and this version of Quire reads 1",
    );
    check_refused(b"QUIREREC\x01\x03\0\0\0\0\0\0", "the algorithm 3 is unknown");
    check_refused(b"QUIREREC\x01\x01\0\0\0\0\0\x01", "reserved");
}

#[test]
fn refused_records() {
    let check = |records: &[&[u8]], expected| check_refused(&recipe(records), expected);
    check(&[], "at byte 16: it ends within a record");
    check(&[b"\x01\x03abc"], "at byte 21: it ends within a record");
    check(&[b"\x01\x03ab"], "at byte 16: it ends within a record");
    check(&[b"\x04"], "the record type 4 is unknown");
    check(&[&end(1)], "the tar has 0 bytes, but the recipe states 1");
    check(&[b"\x01\x01a", &end(0)], "the tar has 1 bytes, but the recipe states 0");
    check(&[&end(0), b"\0"], "there are bytes after the end");
    check(&[b"\x00\0\0\0"], "it ends within a record");
    check(&[b"\x01\x00"], "a length is 0, not between 1 and 65536");
    check(&[b"\x01\x81\x80\x04"], "a length is 65537, not between 1 and 65536");
    check(&[b"\x01\x83\x00abc"], "more bytes than it needs");
    check(&[b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"], "above 2^63 - 1");
    let object = [b'x'; 32];
    let most = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f";
    check(&[b"\x02", &object[..31]], "it ends within");
    check(&[b"\x02", &object, b"\x00"], "a length is 0");
    check(&[b"\x02", &object, most], "cannot read object 7878");
    check(&[b"\x03", &object, b"\x00"], "a length is 0, not between 1 and 65536");
    check(&[b"\x03", &object, b"\x81\x80\x04"], "a length is 65537");
    check(&[b"\x03", &object, b"\x02\x05\x05\x05"], "it ends within");
    check(
        &[b"\x03", &object, b"\x01\x01", most],
        "a range of 9223372036854775807 bytes at byte 1 of",
    );
    check(
        &[b"\x03", &object, b"\x02\x00\x01", most, b"\x01"],
        "a range of 1 bytes at byte 9223372036854775808 of",
    );
    check(
        &[b"\x01\x01a\x02", &object, most],
        "a length is 9223372036854775808, not between 1 and 9223372036854775807",
    );
}

/// Tests objects that are missing, that end early, and whose reads are interrupted.
#[test]
fn failing_objects() {
    let recipe = recipe(&[b"\x02", &[b'x'; 32], b"\x05", &end(5)]);
    let check = |objects: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>, expected: &str| {
        let objects = |_: &ObjectId, into: &mut [u8], offset: u64| objects(into, offset);
        let error = tar(&recipe, objects).unwrap_err();
        let source = std::error::Error::source(&error).unwrap();
        assert!(format!("{error}: {source}").contains(expected), "{error}: {source}");
    };
    let gone =
        "cannot read object 7878787878787878787878787878787878787878787878787878787878787878: gone";
    check(&mut |_, _| Err(io::Error::other("gone")), gone);
    check(
        &mut |into, offset| (&b"1234"[usize::try_from(offset.min(4)).unwrap()..]).read(into),
        "unexpected end",
    );
    let mut is_interrupted = false;
    let slow = |_: &ObjectId, into: &mut [u8], offset: u64| {
        is_interrupted = !is_interrupted;
        if is_interrupted {
            return Err(io::ErrorKind::Interrupted.into());
        }
        into[0] = b"12345"[usize::try_from(offset).unwrap()];
        Ok(1)
    };
    assert_eq!(tar(&recipe, slow).unwrap(), b"12345");
}
