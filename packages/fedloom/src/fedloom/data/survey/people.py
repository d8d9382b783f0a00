"""Columns with names of people, contact details, or text about people, detected by column name and by cells."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from fedloom.data.tables import is_number

MIN_PATTERN_CELLS = 10
"""Smallest number of cells for which the pattern is checked. With fewer cells, most of them may differ by chance."""
MIN_PATTERN_SHARE = 0.8
"""Smallest share of a column's cells that must match a pattern. Real columns also contain remarks and typing errors."""
MIN_DISTINCT_SHARE = 0.5
"""Smallest share of different cells from which on text cannot be a category: two rows per level on average."""
MAX_PATTERN_CELLS = 2000
"""Largest number of different cells whose pattern is checked. With 2,000 cells, a share is known to within 2.2 points
(95 %)."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text that lists names."""
    return frozenset(text.split())


NAME_COLUMNS = words(
    "firstname forename givenname surname lastname familyname maidenname middlename fullname patientname personname "
    "vorname nachname familienname geburtsname patientenname zuname prenom nomdefamille nombre nombres apellido "
    "apellidos cognome sobrenome apelido voornaam achternaam imie nazwisko fornamn efternamn fornavn etternavn "
    "efternavn etunimi sukunimi soyad soyadi имя фамилия отчество фио 姓名 氏名 이름"
)
"""Column names for names of people, in lower case, without spaces and accents."""
POSSIBLE_NAME_WORDS = words("name nom nome naam ad namn navn nimi patient person doctor physician nurse arzt medecin")
"""Column names that may stand for names of people, depending on the cells."""
CONTACT_WORDS = {
    "phone numbers": "phone phonenumber telephone telefon telefonnummer telefono telefone telefoon tel mobile mobil "
    "mobilenumber cellphone handy handynummer fax puhelin телефон 电话 電話",
    "email addresses": "email emailaddress mail mailaddress correo courriel почта 邮箱",
    "addresses": "address streetaddress homeaddress street strasse straße anschrift adresse adres direccion domicilio "
    "indirizzo endereco calle rue adress adresa адрес 地址 住所",
    "insurance or identity numbers": "ssn socialsecuritynumber insurancenumber insuranceid insuranceno "
    "healthcardnumber "
    "nhsnumber nationalid versicherungsnummer versichertennummer versichertennr krankenversicherungsnummer kvnr nir "
    "numerosecuritesociale cpf dni codicefiscale bsn pesel personnummer ahvnummer passport passportnumber снилс 身份证",
}
"""Column names for contact details or identifiers of people."""
EMAIL_PATTERN = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
PHONE_PATTERN = re.compile(r"(\+|00?)?\(?\d[\d ()/.\-]{5,}\d")
PHONE_SIGN_PATTERN = re.compile(r"^[+0(]|[ ()/\-]")
"""Pattern of signs that distinguish a phone or insurance number from a measurement."""
MIN_PHONE_DIGITS = 7
"""Smallest number of digits of a phone number. Years such as 1889-90 and days such as 10/22-25 have fewer digits."""
DECIMAL_PATTERN = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
CALENDAR_DAY_PATTERN = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?")
FULL_NAME_PATTERN = re.compile(r"[^\W\d_a-z]([^\W\d_]|[.'\u2019\-])*(,?\s[^\W\d_]([^\W\d_]|[.'\u2019\-])*){1,4}")
"""Pattern of a person's name: at least two words that consist of letters only, the first capitalized."""
STREET_PATTERN = re.compile(r"(\d+\w?,?\s+[^\W\d_]{3}.*|[^\W\d_].*\s\d+\w?(,.*)?)")
"""Pattern of a street with a number, in either order."""
MIN_WORD_SHARE = 0.2
"""Smallest number of different texts without digits, per text, from which on numbers with words may be addresses
instead of sizes or labels."""
MIN_SENTENCE_WORDS = 4
"""Smallest number of words for a cell to count as a sentence instead of the name of a level."""


def plain_name(name: str) -> str:
    """Return a column's name in lower case, without accents, spaces and signs.

    >>> plain_name("First_Name"), plain_name("Prénom"), plain_name("E-Mail")
    ('firstname', 'prenom', 'email')
    """
    letters = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in letters if c.isalnum())


def personal(name: str, cells: Mapping[str, int], rows: int) -> str:
    """Return the type of personal information in a column, as part of a sentence, or "" if there is none.

    Args:
        name: name of the column.
        cells: number of rows for each different cell that is not missing.
        rows: number of rows whose cell is not missing.
    """
    texts = [cell.strip() for cell, _ in zip(cells, range(MAX_PATTERN_CELLS), strict=False)]
    if not texts:
        return ""
    plain, parts = plain_name(name), {plain_name(word) for word in re.split(r"[\W_]+", name)}
    different = len(cells) / rows
    letters = [t for t in texts if not is_number(t)]
    text = len(letters) >= MIN_PATTERN_SHARE * len(texts)
    if text and any(plain.endswith(end) for end in NAME_COLUMNS if len(end) > 3 or plain == end):
        return "names of people" if len(cells) > 2 else ""
    if rows < MIN_PATTERN_CELLS:
        return ""
    if _share(EMAIL_PATTERN, texts) >= MIN_PATTERN_SHARE:
        return "email addresses"
    many = different >= MIN_DISTINCT_SHARE
    for what, names in CONTACT_WORDS.items():
        listed = names.split()
        if many and (plain in listed or (parts & {*listed} and len(parts) <= 3)) and _reaches(what, texts, text):
            return what
    if not many or not letters:
        return ""
    if sum(bool(PHONE_PATTERN.fullmatch(t) and PHONE_SIGN_PATTERN.search(t) and not DECIMAL_PATTERN.fullmatch(t) and
        not CALENDAR_DAY_PATTERN.fullmatch(t) and sum(map(str.isdigit, t)) >= MIN_PHONE_DIGITS)
           for t in texts) >= MIN_PATTERN_SHARE * len(texts):  # fmt: skip
        return "phone or insurance numbers"
    if (
        text
        and (parts & POSSIBLE_NAME_WORDS or plain in POSSIBLE_NAME_WORDS)
        and sum(any(map(str.isdigit, t)) for t in texts) < MIN_DISTINCT_SHARE * len(texts)
    ):
        return "names of people"
    if text and _share(FULL_NAME_PATTERN, texts) >= MIN_PATTERN_SHARE:
        return "names of people, or other names"
    if text and _share(STREET_PATTERN, texts) >= MIN_PATTERN_SHARE and _vary(texts):
        return "addresses or free text"
    return (
        "free text"
        if text and sum(len(t.split()) >= MIN_SENTENCE_WORDS for t in texts) >= MIN_DISTINCT_SHARE * len(texts)
        else ""
    )


def _share(pattern: re.Pattern[str], texts: list[str]) -> float:
    return sum(pattern.fullmatch(text) is not None for text in texts) / len(texts)


def _vary(texts: list[str]) -> bool:
    """Return True if texts still differ without their digits, as street addresses do.

    ``12 months`` and ``Sample 12`` do not differ.
    """
    words = {"".join(c for c in t if not c.isdigit()) for t in texts}
    return len(words) >= MIN_WORD_SHARE * len(texts)


def _reaches(what: str, texts: list[str], text: bool) -> bool:
    """Return True if the cells fit the meaning of the column's name, unlike cells with yes and no, or with counts."""
    if what == "addresses":
        return text
    if what == "email addresses":
        return _share(re.compile(r".*@.*"), texts) >= MIN_DISTINCT_SHARE
    return sum(
        sum(c.isdigit() for c in t) >= 6 and DECIMAL_PATTERN.fullmatch(t) is None for t in texts
    ) >= MIN_PATTERN_SHARE * len(texts)
