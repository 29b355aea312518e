//! A layer's tar, read out of its recipe piece by piece.

use std::io::{self, Read};

use image::tar::recipe::{Operation, Reader};
use image::verity::ObjectId;
use store::{Layer, ObjectReader, RecipeReader, Store};

use super::BytesError;

/// Reads what the recipe says, without a look at whether that is right.
pub(super) struct Rebuild<'s> {
    store: &'s Store,
    recipe: Reader<RecipeReader>,
    piece: Piece,
    /// The object at hand: sparse files have many ranges of one.
    object: Option<(ObjectId, ObjectReader)>,
}

/// What is being handed out.
enum Piece {
    /// Bytes of the tar itself, up to 64 KiB, from a place in them on.
    Verbatim(Vec<u8>, usize),
    /// A range of the object at hand: where it begins, and how long it is.
    Object(u64, u64),
}

impl<'s> Rebuild<'s> {
    pub(super) fn new(store: &'s Store, layer: &Layer) -> Result<Self, BytesError> {
        let recipe = Reader::new(layer.recipe().map_err(BytesError::Layer)?);
        let recipe = recipe.map_err(BytesError::Recipe)?;
        Ok(Self { store, recipe, piece: Piece::Verbatim(Vec::new(), 0), object: None })
    }

    /// Goes on to the next piece. Answers whether there is one.
    fn advance(&mut self) -> Result<bool, BytesError> {
        let mut buffer = match &mut self.piece {
            Piece::Verbatim(bytes, _) => std::mem::take(bytes),
            Piece::Object(..) => Vec::new(),
        };
        match self.recipe.next_operation().map_err(BytesError::Recipe)? {
            None => return Ok(false),
            Some(Operation::Verbatim(bytes)) => {
                buffer.clear();
                buffer.extend_from_slice(bytes);
                self.piece = Piece::Verbatim(buffer, 0);
            }
            Some(Operation::Range { object, segment }) => {
                if !matches!(&self.object, Some((open, _)) if open == object) {
                    let file = self.store.object(object).map_err(BytesError::Object)?;
                    self.object = Some((*object, file));
                }
                self.piece = Piece::Object(segment.offset, segment.length);
            }
        }
        Ok(true)
    }
}

impl Read for Rebuild<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Headers are small: as many pieces as there is room for.
        let mut filled = 0;
        while filled < into.len() {
            let room = &mut into[filled..];
            match (&mut self.piece, &self.object) {
                (Piece::Verbatim(bytes, at), _) if *at < bytes.len() => {
                    let count = room.len().min(bytes.len() - *at);
                    room[..count].copy_from_slice(&bytes[*at..*at + count]);
                    *at += count;
                    filled += count;
                }
                (Piece::Object(at, left), Some((object, file))) if *left > 0 => {
                    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(room.len());
                    let read = match file.read_at(&mut room[..count], *at) {
                        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        result => result,
                    };
                    let read = read
                        .map_err(|source| BytesError::Read { object: *object, source }.into_io())?;
                    *at += read as u64;
                    *left -= read as u64;
                    filled += read;
                }
                _ => {
                    if !self.advance().map_err(BytesError::into_io)? {
                        break;
                    }
                }
            }
        }
        Ok(filled)
    }
}
