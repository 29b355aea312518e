//! Parts of blobs: no byte behind them is asked for.

use super::*;
use testing::fake::{Server, content, reply};

#[test]
fn a_part_ends_where_it_is_to_end() {
    let bytes = noise(3_000_000);
    let blob = bytes.clone();
    let server = Server::start(move |request, number| match number {
        // In the middle of the part, and then the rest of it.
        0 => content(request, &blob).cut(700_000),
        _ => content(request, &blob),
    });
    let there = registry(&server.host(), &settings());
    let part = there.blob(&digest(&bytes), Some(3_000_000), 100_000).until(1_100_000);
    assert_same(&read(part).unwrap(), &bytes[100_000..1_100_000]);
    let part = there.blob(&digest(&bytes), Some(3_000_000), 0).until(10);
    assert_same(&read(part).unwrap(), &bytes[..10]);
    let part = there.blob(&digest(&bytes), Some(3_000_000), 10).until(10);
    assert_same(&read(part).unwrap(), &[]);
    let asked: Vec<_> =
        server.seen().into_iter().map(|it| it.header("range").unwrap().to_owned()).collect();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert_eq!((asked[0].as_str(), asked[2].as_str()), ("bytes=100000-1099999", "bytes=0-9"));
    assert!(asked[1].ends_with("-1099999"), "{asked:?}");
}

#[test]
fn a_server_without_ranges_is_left_at_the_end_of_the_part() {
    let bytes = noise(2_000_000);
    let blob = bytes.clone();
    let server = Server::start(move |_, _| reply(200).body(&blob));
    let part = registry(&server.host(), &settings())
        .blob(&digest(&bytes), Some(2_000_000), 500)
        .until(1000);
    assert_same(&read(part).unwrap(), &bytes[500..1000]);
    assert_eq!(server.seen().len(), 1);
}
