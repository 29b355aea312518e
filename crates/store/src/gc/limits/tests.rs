use std::time::Duration;

use image::verity::ImageId;
use tempfile::{NamedTempFile, TempDir};

use super::{GcLimits, Seconds, Store, StoreItem};
use crate::tests::{NOW, check, check_clean, import, import_as, name, open, sample};
use crate::{Form, Reference};

/// Makes a store with two images without names. The second one was added in a later second.
fn stage(form: Form) -> (TempDir, Store, [Reference; 2]) {
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    import(&store, "kept", &sample("kept", 3)).unwrap();
    let [old, new] = ["old", "new"].map(|text| {
        import_as(&store, text, &sample(text, 12), form).unwrap();
        let reference = store.refs.get(&name(text)).unwrap().unwrap();
        store.remove_ref(&name(text)).unwrap();
        let next = Seconds(added(&store, &reference.image) + 1);
        let is_later = || {
            let file = NamedTempFile::new_in(directory.path()).unwrap();
            super::added(&rustix::fs::fstat(&file).unwrap()) >= next.0
        };
        while !is_later() {
            std::thread::sleep(Duration::from_millis(20));
        }
        reference
    });
    (directory, store, [old, new])
}

fn added(store: &Store, image: &ImageId) -> i64 {
    store.added(&StoreItem::Image(*image)).unwrap().unwrap()
}

/// Gives an image a name again, and checks that none of its data is lost.
fn check_whole(store: &Store, reference: &Reference) {
    store.set_ref(&name("again"), reference).unwrap();
    check(store).unwrap();
    assert_eq!(check_clean(store).unwrap().len(), 2);
}

fn has(store: &Store, images: &[Reference; 2]) -> [bool; 2] {
    images.each_ref().map(|it| store.images.has(&it.image).unwrap())
}

#[test]
fn what_was_added_lately_stays_whole() {
    for form in [Form::Objects, Form::Packed] {
        let (_directory, store, images) = stage(form);
        let moments = images.each_ref().map(|it| added(&store, &it.image));
        let limits = |moment| GcLimits { added_before: Some(Seconds(moment)), keep_bytes: None };
        let (plan, swept) = store.gc_within(NOW, &limits(moments[0])).unwrap();
        assert_eq!((has(&store, &images), swept.removed), ([true; 2], 0), "{form:?}");
        assert!(plan.spared > 0);
        let dry = store.plan_gc_within(NOW, &limits(moments[1])).unwrap();
        let (plan, swept) = store.gc_within(NOW, &limits(moments[1])).unwrap();
        assert_eq!(has(&store, &images), [false, true], "{form:?}");
        assert!(swept.freed > 0 && plan.spared > 0);
        assert_eq!((dry.garbage, dry.spared), (plan.garbage, plan.spared));
        check_whole(&store, &images[1]);
    }
}

/// `docker builder prune --keep-storage` treats its cache in the same way.
#[test]
fn the_oldest_goes_until_the_rest_has_room() {
    for form in [Form::Objects, Form::Packed] {
        let (_directory, store, images) = stage(form);
        let limits = |bytes| GcLimits { added_before: None, keep_bytes: Some(bytes) };
        let all = store.bytes_on_disk().unwrap();
        let (plan, swept) = store.gc_within(NOW, &limits(all)).unwrap();
        assert_eq!((has(&store, &images), swept.removed), ([true; 2], 0), "{form:?}");
        assert!(plan.spared > 0);
        let (plan, swept) = store.gc_within(NOW, &limits(all - 1)).unwrap();
        assert_eq!(has(&store, &images), [false, true], "{form:?}");
        assert!(swept.freed > 0 && plan.spared > 0);
        check_whole(&store, &images[1]);
        // Images with a name are kept, however small the limit is.
        let (plan, _) = store.gc_within(NOW, &limits(0)).unwrap();
        assert_eq!((check(&store).unwrap().len(), plan.spared), (2, 0));
    }
}

#[test]
fn both_limits_count() {
    let (_directory, store, images) = stage(Form::Objects);
    let moment = added(&store, &images[1].image);
    let limits = GcLimits { added_before: Some(Seconds(moment)), keep_bytes: Some(0) };
    store.gc_within(NOW, &limits).unwrap();
    assert_eq!(has(&store, &images), [false, true]);
    let all = store.bytes_on_disk().unwrap();
    let limits = GcLimits { added_before: Some(Seconds(moment + 1)), keep_bytes: Some(all) };
    store.gc_within(NOW, &limits).unwrap();
    check_whole(&store, &images[1]);
}

/// If an import finds a part of the kept garbage, it finds all of that garbage.
#[test]
fn an_import_finds_what_stays() {
    let (_directory, store, images) = stage(Form::Objects);
    let limits = GcLimits { added_before: Some(Seconds(i64::MIN)), keep_bytes: None };
    store.gc_within(NOW, &limits).unwrap();
    import(&store, "again", &sample("new", 12)).unwrap();
    let again = store.refs.get(&name("again")).unwrap().unwrap();
    assert_eq!(again.image, images[1].image);
    assert_eq!(check_clean(&store).unwrap().len(), 2);
}
