//! Recipes, written while object ids are still being computed.

use std::collections::VecDeque;
use std::io::{BufWriter, Write};

use image::tar::{Segment, recipe};
use image::tree::InodeId;
use image::verity::{Algorithm, ObjectId};

use super::objects::Named;

/// A part of the recipe that cannot be written yet, since it or one before it waits for an object id.
#[derive(Debug)]
enum Part {
    Verbatim(Vec<u8>),
    File(File),
}

/// A file whose content is an object.
#[derive(Debug)]
struct File {
    segments: Box<[Segment]>,
    /// `None` for entries that are in no tree: whiteouts, and other entries that were ignored.
    inode: Option<InodeId>,
    object: Option<ObjectId>,
}

/// Writes a recipe in the order of the tar, whatever the order in which object ids become known.
pub(super) struct Pending<W: Write> {
    out: recipe::Writer<BufWriter<W>>,
    parts: VecDeque<Part>,
    /// For each file among the parts, by its number less that of the first: which part it is, counted from the first
    /// part ever.
    files: VecDeque<u64>,
    /// Parts and files that were written already.
    parts_gone: u64,
    files_gone: u32,
    /// Verbatim bytes among the parts.
    bytes: usize,
    /// Every object, once for each file.
    objects: Vec<ObjectId>,
}

impl<W: Write> Pending<W> {
    pub(super) fn new(out: W, algorithm: Algorithm) -> Result<Self, recipe::WriteError> {
        Ok(Self {
            out: recipe::Writer::new(BufWriter::with_capacity(64 << 10, out), algorithm)?,
            parts: VecDeque::new(),
            files: VecDeque::new(),
            parts_gone: 0,
            files_gone: 0,
            bytes: 0,
            objects: Vec::new(),
        })
    }

    pub(super) fn verbatim(&mut self, bytes: &[u8]) -> Result<(), recipe::WriteError> {
        match self.parts.back_mut() {
            None => return self.out.verbatim(bytes),
            Some(Part::Verbatim(run)) => run.extend_from_slice(bytes),
            Some(Part::File(_)) => self.parts.push_back(Part::Verbatim(bytes.to_vec())),
        }
        self.bytes += bytes.len();
        Ok(())
    }

    /// Takes the content of a file that has no object: all of it.
    pub(super) fn inline(
        &mut self,
        segments: &[Segment],
        content: &[u8],
    ) -> Result<(), recipe::WriteError> {
        for segment in segments {
            let ends = [segment.offset, segment.end()].map(usize::try_from);
            let [Ok(start), Ok(end)] = ends else { continue };
            self.verbatim(&content[start..end])?;
        }
        Ok(())
    }

    /// Takes a file whose object is not known yet; answers the file's number.
    pub(super) fn file(&mut self, segments: &[Segment], inode: Option<InodeId>) -> u32 {
        let number =
            self.files_gone + u32::try_from(self.files.len()).expect("entries are limited");
        self.files.push_back(self.parts_gone + self.parts.len() as u64);
        self.parts.push_back(Part::File(File { segments: segments.into(), inode, object: None }));
        number
    }

    /// Tells the objects of files, and writes what can be written. Passes each file's inode and object on.
    pub(super) fn resolve<E: From<recipe::WriteError>>(
        &mut self,
        ids: &mut Vec<(u32, Named)>,
        mut known: impl FnMut(InodeId, &ObjectId) -> Result<(), E>,
    ) -> Result<(), E> {
        for (number, id) in ids.drain(..) {
            let part = self.files[(number - self.files_gone) as usize] - self.parts_gone;
            let part = usize::try_from(part).expect("an index into memory");
            if let Part::File(file) = &mut self.parts[part] {
                file.object = Some(id.object);
            }
        }
        while let Some(part) = self.parts.front() {
            match part {
                Part::Verbatim(run) => {
                    self.out.verbatim(run)?;
                    self.bytes -= run.len();
                }
                Part::File(File { object: None, .. }) => break,
                Part::File(File { segments, inode, object: Some(id) }) => {
                    self.out.content(segments, recipe::Content::Object(id))?;
                    self.objects.push(*id);
                    if let Some(inode) = inode {
                        known(*inode, id)?;
                    }
                    self.files.pop_front();
                    self.files_gone += 1;
                }
            }
            self.parts.pop_front();
            self.parts_gone += 1;
        }
        Ok(())
    }

    /// Whether all files' objects are known.
    pub(super) fn is_settled(&self) -> bool {
        self.files.is_empty()
    }

    /// Bytes of memory that wait for object ids.
    pub(super) fn waiting(&self) -> usize {
        self.bytes
    }

    /// Ends the recipe; answers the sink, and every object once.
    pub(super) fn finish(mut self) -> Result<(W, Vec<ObjectId>), recipe::WriteError> {
        debug_assert!(self.parts.is_empty(), "resolve() has seen all");
        let out = self.out.finish()?;
        let out =
            out.into_inner().map_err(|error| recipe::WriteError::Write(error.into_error()))?;
        self.objects.sort_unstable();
        self.objects.dedup();
        Ok((out, self.objects))
    }
}
